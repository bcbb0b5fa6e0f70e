"""Hold what is new to the promises that every method and every sampling keeps."""

import feddyn
import steady
from windows import Windows

from fedshuffle import conformance

for method in (feddyn.METHOD, steady.METHOD):
    report = conformance.check(method, ["full", "uniform:2", Windows([0, 0, 1, 1], b=1)])
    print(report if report.failures else f"{method.name} keeps all promises")

report = conformance.check_sampling(Windows([0, 1, 0, 1, 0, 2, 2], b=2))
print(report if report.failures else f"{report.subject}: is what it says")
