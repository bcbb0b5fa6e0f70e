"""Check the new methods and the new sampling with the conformance suite."""

import feddyn
import steady
from windows import Windows

from fedshuffle import testing as conformance

for method in (feddyn.METHOD, steady.METHOD):
    report = conformance.check(method, ["full", "uniform:2", Windows([0, 0, 1, 1], b=1)])
    print(report if report.failures else f"{method.name} passes all checks")

report = conformance.check_sampling(Windows([0, 1, 0, 1, 0, 2, 2], b=2))
print(report if report.failures else f"{report.subject}: is what it says")
