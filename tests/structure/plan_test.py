#!/usr/bin/env python3
"""Checks .ci/plan, which says what of the checks that take turns runs for a commit. Run by ctest."""
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("asan", "arm", "tsan")
NAMES = (*HEAVY, "states", "llama", "even_cases", "odd_cases")


def plan(*arguments, root=ROOT):
    """What runs, and the whole text."""
    output = subprocess.run([root / ".ci/plan", *map(str, arguments)], check=True, capture_output=True, text=True).stdout
    rows = [line.split(" ", 2) for line in output.splitlines()]
    assert tuple(row[0] for row in rows) == NAMES, output
    assert all(row[1] in ("runs", "waits") and row[2] for row in rows), output
    return {row[0] for row in rows if row[1] == "runs"}, output


def git(folder, *arguments):
    settings = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main"]
    when = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}  # the same hashes in each run
    subprocess.run(["git", *settings, "-C", folder, *arguments], check=True, capture_output=True, env={**os.environ, **when})


class Turns(unittest.TestCase):
    def test_every_turn_has_one_heavy_check_and_a_half_of_the_cases(self):
        for number in range(900, 906):
            runs, _ = plan(number, "README.md")
            self.assertEqual(len(runs & set(HEAVY)), 1, runs)
            self.assertEqual(len(runs & {"even_cases", "odd_cases"}), 1, runs)

    def test_a_round_has_everything(self):
        seen = [plan(number)[0] for number in range(30, 36)]
        for name in (*HEAVY, "states", "llama"):
            self.assertEqual([name in runs for runs in seen].count(True), 2, name)
            self.assertIn(name, set.union(*seen[:3]))
        for name in ("even_cases", "odd_cases"):
            self.assertIn(name, seen[0] | seen[1])

    def test_what_waits_says_when_its_turn_is(self):
        for number in range(6):
            for name, then in re.findall(r"^(\w+) waits its turn is with commit (\d+)$", plan(number)[1], re.M):
                self.assertGreater(int(then), number)
                self.assertIn(name, plan(then)[0])


class Changes(unittest.TestCase):
    def test_a_change_takes_the_place_of_the_turn(self):
        for number in range(3):
            for path, name in (
                ("src/cpu/kernels/rows.inl", "arm"),
                ("cmake/aarch64-linux-gnu.cmake", "arm"),
                ("src/core/thread_pool.cpp", "tsan"),
                ("src/cuda/driver/cubin.cpp", "tsan"),
                ("src/model/parse.cpp", "asan"),
                ("src/conformance/mla/case_file.cpp", "asan"),
            ):
                self.assertEqual(plan(number, "README.md", path)[0] & set(HEAVY), {name}, path)

    def test_of_several_changes_the_one_whose_turn_is_next_runs(self):
        changes = ("src/cpu/kernels/rows.inl", "src/core/fork.cpp")
        for number, name in ((0, "arm"), (1, "arm"), (2, "tsan"), (3, "arm")):
            self.assertEqual(plan(number, *changes)[0] & set(HEAVY), {name})

    def test_the_others_come_beside_the_turn(self):
        for number in range(6):
            without, _ = plan(number, "src/cli/main.cpp")
            self.assertEqual(plan(number, "src/cuda/recurrent/recurrent.cu")[0], without | {"states"})
            self.assertEqual(plan(number, "examples/llama/main.cpp")[0], without | {"llama"})
            self.assertEqual(plan(number, "src/conformance/attention/judge.cpp")[0], without | {"even_cases", "odd_cases"})

    def test_every_pattern_has_a_file(self):
        table = (ROOT / ".ci/plan").read_text().split("table='\n")[1].split("'")[0]
        self.assertGreater(len(table.splitlines()), 30)
        for line in table.splitlines():
            pattern, *names = line.split()
            self.assertTrue(set(names) <= {*NAMES, "cases"} and names, line)
            folder, _, rest = pattern.partition("*")[0].rpartition("/")
            files = [f.relative_to(ROOT).as_posix() for f in (ROOT / folder).rglob("*") if f.is_file()]
            as_expression = re.escape(pattern).replace(r"\*", ".*")
            self.assertTrue(any(re.fullmatch(as_expression, f) for f in files), f"{pattern} matches no file")


@unittest.skipUnless(shutil.which("git"), "needs git")
class Repositories(unittest.TestCase):
    def setUp(self):
        kept = tempfile.TemporaryDirectory()
        self.addCleanup(kept.cleanup)
        self.root = Path(kept.name) / "tree"
        (self.root / ".ci").mkdir(parents=True)
        shutil.copy2(ROOT / ".ci/plan", self.root / ".ci/plan")

    def commit(self, path, text="x"):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        git(self.root, "add", "-A")
        git(self.root, "commit", "-qm", path)

    def begin(self):
        git(self.root, "init", "-q")
        self.commit("a")

    def test_without_commits_everything_runs(self):
        self.assertEqual(plan(root=self.root)[0], set(NAMES))

    def test_the_number_is_that_of_the_commits(self):
        self.begin()
        for count in range(2, 6):
            self.commit("b", str(count))
            self.assertEqual(plan(root=self.root)[0], plan(count)[0])

    def test_what_the_last_commit_changes_is_seen_and_no_other(self):
        self.begin()
        self.commit("src/cpu/kernels/rows.inl")
        self.assertEqual(plan(root=self.root)[0], plan(2, "src/cpu/kernels/rows.inl")[0])
        self.commit("b")
        self.assertEqual(plan(root=self.root)[0], plan(3)[0])

    def test_a_merge_changes_what_it_brings(self):
        self.begin()
        git(self.root, "checkout", "-qb", "other")
        self.commit("src/core/fork.cpp")
        self.commit("src/mla/step.cpp")
        git(self.root, "checkout", "-q", "main")
        self.commit("src/model/parse.cpp")
        git(self.root, "merge", "-q", "--no-edit", "other")
        self.assertEqual(plan(root=self.root)[0], plan(5, "src/core/fork.cpp", "src/mla/step.cpp")[0])

    def test_what_is_not_committed_counts(self):
        self.begin()
        self.commit("src/model/parse.cpp")
        self.commit("b")
        (self.root / "src/model/parse.cpp").write_text("y")
        self.assertEqual(plan(root=self.root)[0], plan(3, "src/model/parse.cpp")[0])

    def test_a_clone_without_history_has_a_turn_by_its_hash(self):
        self.begin()
        turns = set()
        for count in range(12):
            self.commit("b", str(count))
            clone = self.root.parent / f"clone{count}"
            git(self.root, "clone", "-q", "--depth", "1", f"file://{self.root}", clone)
            runs, _ = plan(root=clone)
            self.assertEqual(len(runs & set(HEAVY)), 1)
            turns |= runs & set(HEAVY)
        self.assertGreater(len(turns), 1)


if __name__ == "__main__":
    unittest.main()
