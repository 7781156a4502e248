"""Print how long the tests took, from build/tests/*.xml: seconds of each target, and its slowest files and tests."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

MOST = 12
"""Lines of files, and of tests, for each target."""

for report in sorted(Path("build/tests").glob("*.xml")):
    suite = ElementTree.parse(report).getroot().find("testsuite")
    cases = [
        (case.get("classname", ""), case.get("name", ""), float(case.get("time", 0))) for case in suite.iter("testcase")
    ]
    files: Counter[str] = Counter()
    for file, _, seconds in cases:
        files[file] += seconds
    total_s, wall_s = sum(files.values()), float(suite.get("time"))
    print(f"\n{report.stem}: {len(cases)} tests, {total_s:,.0f} s of tests in {wall_s:,.0f} s")
    for file, seconds in files.most_common(MOST):
        print(f"  {seconds:7.1f} s  {file}")
    for file, name, seconds in sorted(cases, key=lambda case: -case[2])[:MOST]:
        print(f"  {seconds:7.1f} s  {file}: {name}")
