#!/usr/bin/env python3
"""Checks what of the GPU benchmark runs anywhere: the table of cells and peers, what a ratio means, and the bridge over a CPU backend.

bench_test.py OBJECT, the standard library only. Run by ctest.
"""
from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import cascade_cells  # noqa: E402
import cells  # noqa: E402
import results  # noqa: E402
import zoo  # noqa: E402
from native import Native, NativeError, Plan  # noqa: E402

OBJECT = ""
SPEC = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "kv": "bf16", "page": 4, "causal": True}
LIMITS = {"requests": 2, "tokens": 8, "seq_len": 64, "query_len": 0}
GROUPS = {"prefill", "prefill_e4m3", "paged", "decode", "e4m3", "ragged", "balanced", "mask", "verify", "launch"}


def by_name() -> dict[str, cells.Cell]:
    return {cell.name: cell for cell in cells.load()}


class Cells(unittest.TestCase):
    def test_every_cell_is_whole(self):
        table = cells.load()
        self.assertEqual(len(table), len(by_name()), "names are unique")
        self.assertEqual({cell.group for cell in table}, GROUPS)
        for cell in table:
            with self.subTest(cell.name):
                self.assertGreater(cell.work, 0)
                self.assertIn(cell.protocol, ("sustained", "graph", "replay"))
                self.assertIn(cell.page, (0, 16, 64, 128, 256))
                self.assertEqual(cell.heads[0] % cell.heads[1], 0)
                self.assertEqual(bool(cell.lengths), cell.context == 0)
                self.assertTrue(cell.lengths or cell.context >= cell.query)
                self.assertTrue(all(us > 0 for us in [*cell.peers.values(), *cell.dense.values()]))
                self.assertTrue(cell.base is None or cell.base in by_name())

    def test_every_floor_has_what_it_is_measured_by(self):
        for cell in cells.load():
            with self.subTest(cell.name):
                for kind, bound in (cell.floor or {}).items():
                    self.assertGreater(bound, 0)
                    self.assertIn(kind, ("peers", "base", "us"))
                    self.assertTrue({"peers": cell.peers or cell.sdpa == "peers", "base": cell.base, "us": True}[kind])

    def test_rows_say_whether_there_are_peers(self):
        data = cells.json.loads(cells.TABLE.read_text())
        for row in data["cells"]:
            self.assertIn("peers", row)
            self.assertTrue(row["peers"] is None or row["peers"], row)

    def test_work_is_counted_as_for_the_peers(self):
        table = by_name()
        self.assertEqual(table["prefill/d128/16-16/1x16384/full"].flops, 4 * 16 * 128 * 16384**2)
        self.assertEqual(table["prefill/d128/16-16/1x16384/causal"].flops, 2 * 16 * 128 * 16384**2)
        self.assertEqual(table["paged/p16/1x512of16384"].flops, 4 * 32 * 128 * (512 * (16384 - 512) + 512**2 / 2))
        self.assertEqual(table["prefill_e4m3/d128/16-16/4x4096/causal"].spec()["q"], "fp8_e4m3")
        self.assertEqual(table["e4m3/p64/4096x64"].kv_bytes, 64 * 4096 * 8 * 128 * 2)
        # 245.9 us are 4.37 TB/s, and 650 TFLOP/s are what they were written down as.
        self.assertAlmostEqual(table["decode/p64/4096x64"].rate(245.9), 4.37, places=2)
        cell = table["prefill/d128/16-16/4x4096/full"]
        self.assertAlmostEqual(cell.rate(cell.peers["FA3"]), 650)

    def test_choosing_brings_the_base(self):
        names = [cell.name for cell in cells.chosen(cells.load(), "verify/q8")]
        self.assertEqual(names, ["verify/q1", "verify/q8"])


class Zoo(unittest.TestCase):
    def test_cells_are_whole_and_meet_everything(self):
        table = zoo.load()
        self.assertEqual(len(table), len({cell.name for cell in table}))
        self.assertGreater(len(table), 300)
        for what in ("group", "page", "kv", "q", "protocol", "head_dim"):
            self.assertGreater(len({getattr(cell, what) for cell in table}), 1, what)
        for group in {cell.group for cell in table}:
            self.assertEqual({cell.page for cell in table if cell.group == group}, {1, 16, 64, 128}, group)
        for cell in table:
            with self.subTest(cell.name):
                self.assertGreater(cell.work, 0)
                self.assertEqual(cell.heads[0] % cell.heads[1], 0)
                self.assertEqual(len(cell.query_lens), cell.batch)
                self.assertLessEqual(cell.read, cell.tokens)
                self.assertEqual(cell.spec().get("window", 0), cell.window)

    def test_a_batch_is_read_as_the_program_reads_it(self):
        self.assertEqual(zoo.batch_of("q512s4k,31q1s4k"), [(1, 512, 4096), (31, 1, 4096)])
        self.assertEqual(zoo.batch_of("8q300"), [(8, 300, 300)])
        mixed = zoo.cell_of({"heads": [8, 2], "head_dim": 64}, "mixed q512s4k,31q1s4k p16 bf16")
        self.assertEqual((mixed.query_lens, mixed.context, mixed.protocol), ([512] + 31 * [1], 4096, "sustained"))
        eager = zoo.cell_of({"heads": [8, 2], "head_dim": 64}, "ragged ragged p1 fp8_e4m3 fp8_e4m3_queries eager")
        self.assertEqual((eager.q, eager.protocol, eager.batch, eager.context), ("fp8_e4m3", "sustained", len(zoo.ragged()), 0))
        self.assertEqual(eager.tokens, next(cell.tokens for cell in cells.load() if cell.lengths == "uniform64"))

    def test_drawn_cells_are_those_of_their_seed_and_not_the_tables(self):
        some = zoo.drawn(300, seed=7)
        self.assertEqual(some, zoo.drawn(300, seed=7))
        self.assertNotEqual(some, zoo.drawn(300, seed=8))
        self.assertEqual(len({cell.name for cell in some} - {cell.name for cell in zoo.load()}), 300)
        self.assertEqual({cell.group for cell in some}, {"decode", "verify", "extend", "chunk", "mixed", "prefill"})
        for cell in some:
            self.assertLessEqual(cell.tokens * cell.heads[1] * cell.head_dim, zoo.MOST_KEYS)
            self.assertLessEqual(cell.flops, zoo.MOST_FLOPS)
            self.assertTrue(all(0 < queries <= cell.context for queries in cell.query_lens), cell.name)

    def test_windows_hide_work(self):
        cell = next(cell for cell in zoo.load() if cell.window == 128 and cell.group == "decode" and cell.context > 128)
        self.assertEqual(cell.read, cell.batch * 128)
        wide = dataclasses.replace(cell, query=300, context=400, batch=1)
        self.assertEqual(wide.seen(300), 272 * 128 + sum(range(101, 129)))


class CascadeCells(unittest.TestCase):
    def test_a_cell_is_read_as_it_is_written(self):
        for text in ("32/8:64x8192+100", "96/8:2x16+7q5"):
            self.assertEqual(str(cascade_cells.Cell.parse(text)), text)
        cell = cascade_cells.Cell.parse("96/8:64x8192+100q5")
        self.assertEqual(cell, cascade_cells.Cell(q_heads=96, kv_heads=8, requests=64, common=8192, own=100, query=5))
        self.assertEqual((cell.length, cell.tokens), (8292, 320))

    def test_cells_that_cannot_be_are_refused(self):
        batches = ("64x8192", "4x17+1", "4x0+1", "0x16+1", "4x16+4q5", "4x16+0", "4x16+4q0")
        for text in [f"32/8:{batch}" for batch in batches] + ["30/8:4x16+1", "32/0:4x16+1", "0/8:4x16+1"]:
            with self.subTest(text), self.assertRaises(ValueError):
                cascade_cells.Cell.parse(text)


class Results(unittest.TestCase):
    def test_a_peer_in_this_process_replaces_its_older_figure(self):
        cell = by_name()["prefill/d128/16-16/16x1024/full"]
        fa3 = cell.peers["FA3"]
        result = results.judge(cell, fa3, {"cuDNN": fa3 * 2, "FA2": fa3 * 3})
        self.assertEqual(result["best"][0], "FA3")
        self.assertAlmostEqual(result["ratio"], 1)
        self.assertTrue(result["met"])
        self.assertFalse(results.judge(cell, fa3 / 0.96, {"cuDNN": fa3 * 2, "FA2": fa3 * 3})["met"])
        slower = results.judge(cell, fa3, {"cuDNN": fa3 / 2})
        self.assertEqual(slower["best"], ("cuDNN", fa3 / 2))
        self.assertAlmostEqual(slower["drift"]["cuDNN"], fa3 / 2 / cell.peers["cuDNN"])
        self.assertRegex(results.drifts([slower, slower]), r"cuDNN 0\.504 \(0\.504 to 0\.504, 2 cells\)")

    def test_dense_peers_are_shown_but_do_not_count(self):
        result = results.judge(by_name()["decode/p64/4096x64"], 245.9, {"cuDNN": 200.0})
        self.assertEqual((result["best"][0], result["best_dense"]), ("FlashInfer", ("cuDNN", 200.0)))
        self.assertTrue(result["met"])

    def test_floors_of_time_and_of_the_base(self):
        launch, verify = by_name()["launch/graph"], by_name()["verify/q4"]
        self.assertTrue(results.judge(launch, 8.1, {})["met"])
        self.assertFalse(results.judge(launch, 8.2, {})["met"])
        self.assertTrue(results.judge(verify, 105.0, {}, 100.0)["met"])
        self.assertFalse(results.judge(verify, 105.1, {}, 100.0)["met"])
        self.assertNotIn("met", results.judge(verify, 100.0, {}))

    def test_the_table_has_a_line_for_every_cell(self):
        done = results.judge(by_name()["verify/q4"], 300.0, {}, 290.0)
        left = {"cell": "verify/q8", "status": "not run", "why": "no time"}
        lines = results.table([done, left]).splitlines()
        self.assertEqual(len(lines), 3)
        self.assertIn("met", lines[1])
        self.assertIn("not run: no time", lines[2])
        short = [line.split() for line in results.short_table([done, left]).splitlines()]
        self.assertEqual(short[1], ["verify", "2", "1", "1", "0", "0.967", "0.967", "0.967"])
        self.assertEqual(short[2][1:], short[1][1:])


class Bridge(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.native = Native(OBJECT)

    def plan(self, **changed) -> Plan:
        return Plan(self.native, "cpu", "auto", {**SPEC, **changed}, LIMITS)

    def attend(self, plan: Plan, keys, columns: int, count: int, stride: int) -> list[int]:
        """Keys are all alike, so a row is the mean of its values: 1.0 (0x3f80) in the first and last 128 elements, 2.0 (0x4000) between."""
        plan.update([0, 2], [6], ctypes.addressof(keys), columns)
        q, out = (ctypes.c_uint16 * 128)(*[0x3F80] * 128), (ctypes.c_uint16 * 128)()
        k = (ctypes.c_uint16 * 384)(*[0x3F80] * 384)
        v = (ctypes.c_uint16 * 384)(*([0x3F80] * 128 + [0x4000] * 128 + [0x3F80] * 128))
        self.kept = (q, k, v, out, keys)  # host_us() runs with them again
        plan.run(*(ctypes.addressof(a) for a in (q, k, v)), count, stride, ctypes.addressof(out))
        return list(out)

    def test_pages_with_a_stride(self):
        with self.plan() as plan:
            # Pages of 4 x 2 x 16 elements: 0 and 2 of three, seen as 0 and 1 of two.
            self.assertEqual(self.attend(plan, (ctypes.c_int32 * 2)(1, 0), 2, 2, 256), [0x3F80] * 128)
            self.assertEqual(self.attend(plan, (ctypes.c_int32 * 2)(1, 1), 2, 3, 128), [0x4000] * 128)
            self.assertIn("cpu", str(plan))
            self.assertGreater(plan.host_us(True, 3), 0)
            self.assertGreater(plan.host_us(False, 3), 0)

    def test_plans_for_shared_prompts_with_tables_on_the_host(self):
        with Plan(self.native, "cpu", "auto", SPEC, {**LIMITS, "shared_prompts": True}, host_table=True) as plan:
            self.assertEqual(self.attend(plan, (ctypes.c_int32 * 2)(1, 0), 2, 2, 256), [0x3F80] * 128)
        # Neither changes what a CPU computes; that they are read shows where they are of another type.
        for changed in ({"limits": {**LIMITS, "shared_prompts": "yes"}}, {"limits": LIMITS, "host_table": "yes"}):
            with self.subTest(changed), self.assertRaisesRegex(NativeError, "must be boolean"):
                Plan(self.native, "cpu", "auto", SPEC, **changed)

    def test_ragged_rows(self):
        with self.plan(page=0) as plan:
            # Rows 4 to 9: four of 2.0 and two of 1.0, of which the first query does not see the last. 1.8 and 1.667.
            self.assertEqual(self.attend(plan, (ctypes.c_int32 * 2)(4, 10), 2, 12, 32), [0x3FE6] * 64 + [0x3FD5] * 64)

    def test_expressions_and_their_tensors(self):
        rows, mask = (ctypes.c_int32 * 2)(4, 10), "int hidden[,]; kv <= q & kv != hidden[batch, q]"
        with self.plan(page=0, causal=False, mask_mod=mask, score_mod="float bias[]; score + bias[kv]") as plan:
            # Without its key 5, of 1.0, the last query has one of 1.0 left. Then a bias hides keys 0 and 1, of 2.0, from both.
            hidden, bias = (ctypes.c_int32 * 6)(-1, -1, -1, -1, -1, 5), (ctypes.c_float * 6)()
            plan.add_tensor(True, "hidden", ctypes.addressof(hidden), "i32", (1, 6))
            plan.add_tensor(False, "bias", ctypes.addressof(bias), "f32", (6,))
            self.assertEqual(self.attend(plan, rows, 2, 12, 32), [0x3FE6] * 128)
            bias[0] = bias[1] = -float("inf")
            self.assertEqual(self.attend(plan, rows, 2, 12, 32), [0x3FD5] * 128)
            with self.assertRaises(NativeError) as raised:
                plan.add_tensor(True, "deep", ctypes.addressof(hidden), "i32", (1,) * 6)
            self.assertEqual(raised.exception.code, "bench.tensor")

    def test_errors_have_codes(self):
        for code, make in (
            ("spec.num_kv_heads.divides", lambda: self.plan(kv_heads=3)),
            ("dtype.unknown", lambda: self.plan(kv="bf17")),
            ("spec.kv_dtype.fp8_queries", lambda: self.plan(q="fp8_e4m3")),
            ("select.forced", lambda: Plan(self.native, "cpu", "cuda_sm80", SPEC, LIMITS)),
        ):
            with self.subTest(code), self.assertRaises(NativeError) as raised:
                make()
            self.assertEqual(raised.exception.code, code, str(raised.exception))
        with self.plan() as plan, self.assertRaises(NativeError) as raised:
            plan.update([0, 9], [9], 0)
        self.assertEqual(raised.exception.code, "batch.num_tokens.limit")

    def test_a_missing_gpu_is_a_clear_error(self):
        text = (
            f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
            "from native import Native, NativeError, Plan\n"
            f"try: Plan(Native({OBJECT!r}), 'cuda:0', 'auto', {SPEC!r}, {LIMITS!r})\n"
            "except NativeError as error: print(error)"
        )
        # A driver that is not there: the same answer on machines that have one.
        environment = {**os.environ, "IMBREX_CUDA_DRIVER": "libno_such_driver.so"}
        said = subprocess.run([sys.executable, "-c", text], env=environment, check=True, capture_output=True, text=True).stdout
        self.assertRegex(said, r"^device\.absent: .*libno_such_driver\.so")


class Script(unittest.TestCase):
    def run_script(self, *arguments: str, script: str = "gpu_bench.py") -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, str(ROOT / "scripts" / script), *arguments], capture_output=True, text=True)

    def test_list_and_wrong_arguments(self):
        self.assertEqual(self.run_script("--list").stdout.split(), [cell.name for cell in cells.load()])
        self.assertEqual(self.run_script("--only", "no-such-cell").returncode, 2)
        with tempfile.TemporaryDirectory() as folder:
            missing = self.run_script("--object", f"{folder}/absent.so")
        self.assertEqual(missing.returncode, 2)
        self.assertIn("imbrex_bench", missing.stderr)

    def test_arguments_of_gpu_cascade(self):
        self.assertIn("--flashinfer", self.run_script("--help", script="gpu_cascade.py").stdout)
        for arguments, said in ((["32/8:4x17+1"], "whole pages of 16"), (["--library", "absent.so"], "imbrex_bench")):
            wrong = self.run_script(*arguments, script="gpu_cascade.py")
            self.assertEqual(wrong.returncode, 2)
            self.assertIn(said, wrong.stderr)


if __name__ == "__main__":
    OBJECT = sys.argv.pop()
    unittest.main()
