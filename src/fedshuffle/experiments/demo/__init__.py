"""The demo: three methods on real data, and the objective that each really minimises."""
