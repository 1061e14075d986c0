"""`--write`: benchmarks that document their result write it to docs/benchmarks.md."""


def pytest_addoption(parser):
    parser.addoption("--write", action="store_true", help="write results to docs/benchmarks.md")
    parser.addoption("--rounds", type=int, default=2, help="of which the best counts (default %(default)s)")
    parser.addoption("--seconds", type=int, default=2, help="of each measurement (default %(default)s)")
