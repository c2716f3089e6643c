# SPDX-License-Identifier: Apache-2.0
"""What attention may cost at most, counted from its machine code; no GPU runs it."""

import json
from typing import Any

import pytest

from tests.kernels.aot import Resources
from tests.kernels.machine_code import (
    INSTRUCTION,
    LoopCounts,
    buffers,
    bytes_asked,
    inner_loop,
    shortest_turn,
)
from tests.kernels.test_compiled import printed

COUNT = """
import json, sys
from dataclasses import asdict
from benchmarks.gpu.kernels_alone import without_the_plugin
without_the_plugin()
from tests.kernels import aot, machine_code as code
found = []
for shape in eval(sys.argv[1], vars(aot)):
    for capability in map(int, sys.argv[2:]):
        counts = code.decode_counts(shape, capability)
        found.append(asdict(counts) | {"share": counts.share()})
print(json.dumps(found))
"""
BF16 = "dtype=torch.bfloat16"
LISTING = """
_attend:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64] ;
        /*0050*/              @!P1 LDG.E R4, desc[UR4][R2.64] ;
        /*0060*/                   LDSM.16.M88.4 R4, [R3] ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0080*/                   MUFU.EX2 R4, R4 ;
        /*0090*/              @!P1 BRA `(.L_x_3) ;
        /*00a0*/                   FFMA R4, R4, R5, R6 ;
.L_x_3:
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00c0*/                   FADD R4, R4, R5 ;
        /*00d0*/               @P0 BRA `(.L_x_2) ;
        /*00e0*/                   EXIT ;
.L_x_4:
        /*00f0*/                   BRA `(.L_x_4);
"""
IR = """
    %2 = tt.load %1 : !tt.ptr<i32> loc(#loc)
    %3 = scf.for %i = %a to %b step %c iter_args(%x = %y) -> (i32) : i32 {
      %4 = tt.load %5, %6, %7 : tensor<16x64x!tt.ptr<bf16>> loc(#loc)
      %8 = tt.load %9, %6, %7 : !tt.ptr<i32> loc(#loc)
      tt.store %9, %10, %11 : tensor<4x!tt.ptr<f32>> loc(#loc)
      scf.yield %8 : i32
    }
    tt.store %12, %13, %14 : tensor<4x128x!tt.ptr<f32>> loc(#loc)
"""


def test_the_loop_with_the_work_is_found_and_its_opcodes_without_predicates() -> None:
    found = inner_loop(LISTING)
    kinds = [opcode.split(".")[0] for opcode in found]
    work = ["LDGSTS", "LDG", "LDSM", "HMMA", "MUFU", "BRA", "FFMA", "BAR", "FADD", "BRA"]
    assert kinds == work


def test_a_turn_without_what_its_branches_skip() -> None:
    kinds = [opcode.split(".")[0] for opcode in shortest_turn(LISTING)]
    assert kinds == ["LDGSTS", "LDG", "LDSM", "HMMA", "MUFU", "BRA", "BAR", "FADD", "BRA"]


def test_bytes_are_those_of_shapes() -> None:
    inside = 16 * 64 * 2 + 4 + 4 * 4
    assert bytes_asked(IR) == (inside, 4 + 4 * 128 * 4)


def test_buffers_are_the_fewest() -> None:
    alloc = "%k = ttg.local_alloc : () -> !ttg.memdesc<{}x16x64xbf16, #shared, #smem, mutable>\n"
    assert buffers(alloc.format(3) + alloc.format(2)) == 2
    assert buffers("nothing is copied") == 0


def test_the_roof_is_the_lowest_of_three() -> None:
    """An H100 by hand: 132 multiprocessors of 4 schedulers at 1.755 GHz, 3.35 TB/s."""
    resources = Resources("attend", "", 90, 4, 128, 50_000, 0)
    counts = LoopCounts(resources, 200.0, 0, 0, 0, 0, 0, 0, 512, 512, 2, 16_384)
    assert counts.programs() == 4  # 65,536 registers by 128 * 128
    assert counts.issue_share() == pytest.approx(132 * 4 * 1.755e9 / 200 * 512 / 3.35e12)
    assert counts.l2_share() == pytest.approx(5.5 / 3.35 / 2)
    assert counts.latency_share() == pytest.approx(132 * 4 * 16_384 / 1e-6 / 3.35e12)
    assert counts.share() == counts.issue_share() < 1


def counted(shapes: str, *capabilities: int) -> list[dict[str, Any]]:
    return json.loads(printed(COUNT, shapes, *capabilities)[-1])


def check(
    found: list[dict[str, Any]],
    instructions: float,
    beyond: float,
    spilled: int = 0,
    buffers: int = 2,
) -> None:
    for counts in found:
        assert counts["instructions"] <= instructions, counts
        assert counts["other_bytes"] <= beyond * counts["kv_bytes"], counts
        assert counts["buffers"] >= buffers, counts
        assert counts["resources"]["spilled"] <= spilled, counts
        assert counts["share"] == 1.0, "the memory is not what limits it"


GROUPS = f"[Shape({{0}}{BF16}), Shape({{0}}{BF16}, group=8)]"


def test_units_of_16() -> None:
    check(counted(GROUPS.format("unit=16, "), 90), 34, 0.05)


def test_single_tokens() -> None:
    check(counted(GROUPS.format(""), 90), 48, 0.35, buffers=1)


def test_long_heads() -> None:
    """A warp a head, as in shorter ones: what warps would do together each of them would repeat.

    One buffer, and two programs on a multiprocessor, that hide the copies of each other.
    """
    check(counted(f"[Shape(head_size=256, {BF16})]", 90), 80, 0.16, buffers=1)


PROMPTS = """
import json, sys
from dataclasses import asdict
from benchmarks.gpu.kernels_alone import without_the_plugin
without_the_plugin()
from tests.kernels import aot, machine_code as code
for capability in map(int, sys.argv[2:]):
    for shape in eval(sys.argv[1], vars(code)):
        for counts in code.prompt_counts(shape, capability):
            print(json.dumps(asdict(counts) | {"programs": counts.programs()}))
"""


def check_prompts(
    shapes: str, capability: int, attention: float, sums: float, least: int = 3
) -> None:
    """Bounds on warp instructions for 32 logits, and on the sums' programs at a time."""
    found = [json.loads(line) for line in printed(PROMPTS, shapes, capability)]
    for counts in found:
        alone = counts["resources"]["kernel"] == "column_sums"
        assert counts["instructions"] <= (sums if alone else attention), counts
        assert counts["mufu"] < 1.4, "an exponential is one of them, and one instruction"
        assert counts["resources"]["spilled"] == 0, counts
        assert counts["programs"] >= (least if alone else 1), counts
    assert len(found) % 2 == 0 and found


def test_prompts() -> None:
    check_prompts("PROMPT_SHAPES[:1]", 90, 12, 9.2)


@pytest.mark.slow
def test_prompts_on_other_gpus() -> None:
    check_prompts("PROMPT_SHAPES[:4]", 90, 12, 9.2)
    check_prompts("PROMPT_SHAPES[:4]", 80, 26, 12.5)
    check_prompts("PROMPT_SHAPES[4:]", 90, 42, 34, least=2)
    check_prompts("PROMPT_SHAPES[4:]", 80, 46, 30, least=2)


@pytest.mark.slow
def test_on_every_gpu() -> None:
    check(counted(GROUPS.format("unit=16, "), 80, 90, 100), 34, 0.05)
    check(counted(GROUPS.format("unit=64, block_size=64, pages=33, "), 80, 90, 100), 36, 0.05)
    check(counted(GROUPS.format(""), 80, 90, 100), 48, 0.35, buffers=1)
    check(
        counted(f"[Shape(head_size=256, {BF16}, keep_logits=False)]", 80, 90, 100), 80, 0.16, 40, 1
    )


JUDGE = """
import json, sys
from dataclasses import asdict
from benchmarks.gpu.kernels_alone import without_the_plugin
without_the_plugin()
from tests.kernels import aot, machine_code as code
found = []
for shape in eval(sys.argv[1], vars(aot)):
    for capability in map(int, sys.argv[3:]):
        counts = code.judge_counts(shape, capability, int(sys.argv[2]))
        found.append(asdict(counts) | {"per_logit": counts.per_logit})
print(json.dumps(found))
"""


def check_judge(shapes: str, asking: int, per_logit: float, *capabilities: int) -> None:
    for counts in json.loads(printed(JUDGE, shapes, asking, *capabilities)[-1]):
        assert counts["per_logit"] <= per_logit, counts
        assert counts["resources"]["spilled"] == 0, counts


def test_a_logit_of_the_judge() -> None:
    """Its product as a float, the key's scale, a maximum, an exponential and a sum, and a share of
    what is done once for a unit or a key."""
    check_judge("[Shape(unit=16, recall=8)]", 32, 14, 90)


@pytest.mark.slow
def test_a_logit_of_the_judge_on_every_gpu() -> None:
    """Single tokens have 16 queries with those that only pad."""
    sizes = "[Shape(unit=16, recall=8, head_size=n) for n in (64, 128, 256)]"
    check_judge(sizes, 32, 20, 80, 86, 90, 100, 120)
    check_judge(sizes, 1, 23, 80, 90)
    check_judge("[Shape(unit=4, recall=64)]", 32, 22, 80, 90)
    check_judge("[Shape(unit=64, block_size=64, pages=33, recall=2)]", 32, 17, 80, 90)
    check_judge("[replace(LATENT, unit=16, recall=8)]", 32, 20, 80, 90)


LIST = """
from benchmarks.gpu.kernels_alone import without_the_plugin
without_the_plugin()
from tests.kernels import aot, launchers
launches = aot.launches_of(launchers.Layer(aot.SPLIT_SHAPE).prefill)
launch = next(one for one in launches if one.name == "attend_strides")
print(aot.run_tool("nvdisasm", "-c", aot.binary_of(launch, 90).asm["cubin"]))
"""


def test_the_last_part_sees_what_all_have_left() -> None:
    """All of a program's threads have written before one of them counts, for the whole device; and
    who then reads finds nothing older in the cache of its own multiprocessor."""
    codes = [found[1] for line in printed(LIST) if (found := INSTRUCTION.match(line))]
    (count,) = [i for i, code in enumerate(codes) if code.startswith("ATOM")]
    kinds = ("BAR.", "MEMBAR", "ATOMG", "CCTL", "STG", "LDG")
    before = [code for code in codes[:count] if code.startswith(kinds)]
    after = [code for code in codes[count:] if code.startswith(kinds)]
    assert before[-1] == "MEMBAR.ALL.GPU" and before[-2].startswith("BAR.SYNC"), before[-4:]
    assert after[0] == "ATOMG.E.ADD.STRONG.GPU" and after[1] == "CCTL.IVALL", after[:4]
    assert after[2].startswith("BAR.SYNC"), after[:4]


CHOOSE = """
import json, sys
from benchmarks.gpu.kernels_alone import without_the_plugin
without_the_plugin()
from tests.kernels import aot, machine_code as code
found = []
for shape in eval(sys.argv[1], vars(aot)):
    layer = aot.Layer(shape)
    for capability in map(int, sys.argv[2:]):
        launches = aot.launches_of(lambda: layer.recall(32), capability)
        kernels = {one.name: one for one in launches}
        both = [kernels[name] for name in ("keep_of_strides", "insert_strides")]
        found.append([code.float_operations(one, capability, "choose.py") for one in both])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_stride_chooses_alike_in_both_kernels() -> None:
    """``keep_of_strides`` says what is stored, ``insert_strides`` what leaves: bit for bit alike.

    They are compiled apart, so one could contract a sum that the other does not.
    """
    shapes = "[RECALL_SHAPES[0], replace(RECALL_SHAPES[1], reduction='max'), RECALL_SHAPES[10]]"
    pairs = json.loads(printed(CHOOSE, shapes, 80, 86, 90, 120)[-1])
    assert len(pairs) == 12 and all(len(keeps) >= 4 for keeps, _ in pairs)
    for keeps, inserts in pairs:
        assert keeps == inserts
