# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks use of Triton, most of it of its interpreter, and of torch."""

from .row import called, given, read, replaced, rows

ENGINES_OF_BENCHMARKS = "benchmarks/running/engines.py"
RUNNER_V2 = "tests/engine/runner_v2.py"
TEST_OPS = "tests/kernels/test_ops.py"
TEST_REPLAY = "tests/attention/test_replay.py"
TEST_VARIANTS = "tests/attention/test_variants.py"
QUICKENED = "tests/interpreter.py"
UNDER_GUARD = "tests/kernels/conftest.py"
DESCRIBED = "shapes and types are described once"
ONCE = "operations are looked for once"

INTERPRETER = (
    *rows(
        "triton.runtime.interpreter",
        InterpretedFunction=given("launches are counted", TEST_VARIANTS),
        InterpreterError=given("what a kernel raises", QUICKENED),
        _patch_attr=called(ONCE, "(obj, name, member, builder, ...)", QUICKENED),
        _patch_builtin=replaced(ONCE, "(pkg, builder, scope)", QUICKENED),
        _patch_lang=called(ONCE, "(fn)", QUICKENED),
        _interpreter=replaced("addresses are checked", "", UNDER_GUARD),
        _get_np_dtype=replaced(DESCRIBED, "(tt_dtype)", QUICKENED),
        interpreter_builder=read("its options", "", QUICKENED),
    ),
    *rows(
        "triton.runtime.interpreter.InterpreterOptions",
        debug=read("overflows are not looked for", "bool", QUICKENED),
        sanitize_overflow=read("overflows are not looked for", "bool", QUICKENED),
    ),
    *rows(
        "triton.language.core.block_type",
        __init__=replaced(DESCRIBED, "(self, element_ty, shape)", QUICKENED),
    ),
    *rows(
        "triton.language.core.tensor",
        __init__=replaced(DESCRIBED, "(self, handle, type)", QUICKENED),
    ),
    *rows(
        "triton.runtime.interpreter.InterpretedFunction",
        __call__=replaced(ONCE, "(self, *args, **kwargs)", QUICKENED),
    ),
    *rows(
        "triton.runtime.interpreter.GridExecutor",
        __call__=replaced("launches are replayed", "(self, *args_dev, **kwargs)", TEST_REPLAY),
        _init_args_hst=replaced("addresses are checked", "(self, args_dev, kwargs)", UNDER_GUARD),
    ),
    *rows(
        "triton.backends",
        backends=replaced("vLLM looks for one for CPUs", "dict[str, Backend]", RUNNER_V2),
    ),
    *rows(
        "torch.cpu",
        _is_avx512_bf16_supported=called("whether bf16 is fast", "()", ENGINES_OF_BENCHMARKS),
        _is_amx_tile_supported=called("whether bf16 is fast", "()", ENGINES_OF_BENCHMARKS),
    ),
    *rows(
        "torch._subclasses.fake_tensor",
        FakeTensorMode=called(
            "operators without data", "(*, ..., allow_non_fake_inputs=, ...)", TEST_OPS
        ),
    ),
    *rows(
        "torch.utils._python_dispatch",
        TorchDispatchMode=given("nothing but kernels may run", TEST_REPLAY),
    ),
)
