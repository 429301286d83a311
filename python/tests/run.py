"""Runs all tests, or those that the arguments name, and writes results in the form of Rust's, which scripts/check counts.

usage: python python/tests/run.py [MODULE[.CLASS[.TEST]] ...]
"""

import os
import sys
import time
import unittest
from pathlib import Path


class Result(unittest.TestResult):
    """Writes a line for each test when it has ended."""

    passed = 0

    def startTest(self, test):
        super().startTest(test)
        self._begin, self._bad = time.monotonic(), 0

    def stopTest(self, test):
        bad = len(self.failures) + len(self.errors)
        word, seconds = "ok" if bad == self._seen else "FAILED", time.monotonic() - self._begin
        self.passed += bad == self._seen
        self._seen = bad
        # Rust's own lines end with the word.
        print(f"# {seconds:.1f} s")
        print(f"test {test.id()} ... {word}", flush=True)
        for _, text in (self.failures + self.errors)[-1:] if word == "FAILED" else []:
            # Behind that line, where scripts/check looks: what was raised, by ranks first.
            raised = [line for line in text.splitlines() if "Error" in line] or text.splitlines()
            print(*("# " + line[:400] for line in raised[:4]), sep="\n", flush=True)
        super().stopTest(test)

    _seen = 0


def main():
    here = Path(__file__).resolve().parent
    os.chdir(here)
    loader = unittest.TestLoader()
    names = sys.argv[1:]
    tests = loader.loadTestsFromNames(names) if names else loader.discover(str(here))
    result, begin = Result(), time.monotonic()
    tests.run(result)
    for test, text in result.failures + result.errors:
        print(f"---- {test.id()}\n{text}")
    for test, why in result.skipped:
        print(f"SKIPPED: {test.id()}: {why}")
    failed = result.testsRun - result.passed
    word = "FAILED" if failed or result.errors else "ok"
    seconds = time.monotonic() - begin
    print(f"test result: {word}. {result.passed} passed; {failed} failed; 0 ignored; finished in {seconds:.2f}s", flush=True)
    sys.exit(word != "ok")


if __name__ == "__main__":
    main()
