"""The SASS reader: opcodes, operands, predicates and classes, on real machine code and case by case."""

from __future__ import annotations

from pathlib import Path

import pytest
from shared import REPORTED, a_variant_elsewhere, tiers

from flashlab.build import compiler, sass
from flashlab.build.compiler import Cubin
from flashlab.build.sass import CLASSES, Instruction
from flashlab.core.errors import MissingPackageError, ParameterError
from flashlab.kernels.registry import ARCHS, CUDA_STAGES, Stage, capability

EXPLAINED = {"NANOSLEEP", "USETMAXREG"}
"""Opcodes that are known and belong to no class of their own."""
EVERYTHING = """
#include <cuda_fp16.h>
extern "C" __global__ void kernel(float* out, const float* in, const __half2* halves, int* counters, int n) {
  __shared__ float tile[1024];
  __shared__ __align__(16) unsigned matrix[128];
  const int i = threadIdx.x;
  float x = in[i];
  tile[i] = x;
  __syncthreads();
  for (int k = 0; k < n; ++k) x = x * tile[(i + k) % 1024] + in[k];
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  const __half2 h = __hfma2(halves[i], halves[i + 1], halves[i + 2]);
  x += __low2float(h) + __half2float(__float2half(x));
  unsigned r[2];
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(matrix)) + (i % 8) * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at));
  float d[4] = {x, x, x, x};
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%4}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(r[0]), "r"(r[1]));
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(at), "l"(in));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
  float indexed[64] = {};
  for (int k = 0; k < n; ++k) indexed[counters[k] % 64] += in[k];
  atomicAdd(counters, i);
  out[i] = d[0] + d[1] + d[2] + d[3] + matrix[i % 128] + indexed[n % 64];
}
"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("sass") / "everything.cu"
    source.write_text(EVERYTHING, encoding="utf-8")
    return source


def instruction(text: str) -> Instruction:
    predicate, _, rest = text.partition(" ") if text.startswith("@") else (None, "", text)
    opcode, _, operands = rest.partition(" ")
    return Instruction(address=0x100, opcode=opcode, operands=operands.replace(", ", ","), predicate=predicate)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HMMA.16816.F32 R4, R8, R12, R4", "tensor"),
        ("HGMMA.64x64x16.F32 R24, gdesc[UR4], R24", "tensor"),
        ("QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", "tensor"),
        ("IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4", "tensor"),
        ("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT", "tensor"),
        ("MUFU.EX2 R3, R4", "mufu"),
        ("FFMA R1, R2, R3, R4", "fma"),
        ("FFMA2 R2, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO", "fma"),
        ("FMNMX R1, R2, R3, !PT", "fma"),
        ("FSETP.GT.AND P0, PT, R1, R2, PT", "fma"),
        ("HFMA2.MMA R1, R2, R3, R4", "half"),
        ("HFMA2.BF16_V2 R1, R2, R3, R4", "half"),
        ("HFMA2.MMA R133, -RZ, RZ, 0, 0", "move"),
        ("HADD2.F32 R4, -RZ, R5.H0_H0", "convert"),
        ("HADD2 R4, R5, R6", "half"),
        ("F2FP.F16.F32.PACK_AB R1, R2, R3", "convert"),
        ("I2F.RP R0, R5", "convert"),
        ("IMAD.WIDE R2, R3, 0x4, R4", "integer"),
        ("IMAD.MOV.U32 R2, RZ, RZ, R3", "move"),
        ("UIADD3 UR4, UR5, UR6, URZ", "integer"),
        ("LOP3.LUT R1, R2, R3, RZ, 0xfc, !PT", "integer"),
        ("PRMT R1, R2, 0x7632, R3", "integer"),
        ("S2R R1, SR_TID.X", "move"),
        ("ULDC.64 UR4, c[0x0][0x208]", "move"),
        ("LDCU.64 UR4, c[0x0][0x358]", "move"),
        ("SHFL.BFLY PT, R1, R2, 0x1, 0x1f", "shuffle"),
        ("LDS.128 R4, [R8]", "shared_load"),
        ("LDSM.16.M88.4 R4, [R8]", "shared_load"),
        ("STS.128 [R8], R4", "shared_store"),
        ("ATOMS.ADD RZ, [R8], R4", "shared_store"),
        ("LDG.E.128.CONSTANT R4, desc[UR4][R8.64]", "global_load"),
        ("LD.E R4, desc[UR4][R8.64]", "global_load"),
        ("STG.E.64 desc[UR4][R8.64], R4", "global_store"),
        ("REDG.E.ADD.STRONG.GPU desc[UR4][R8.64], R4", "global_store"),
        ("ATOMG.E.ADD.STRONG.GPU PT, R1, desc[UR4][R8.64], R4", "global_store"),
        ("LDGSTS.E.BYPASS.128 [R1], desc[UR4][R8.64]", "async_copy"),
        ("UBLKCP.S.G [UR4], [UR6], UR8", "async_copy"),
        ("UTMALDG.4D [UR8], [UR4], desc[UR6]", "async_copy"),
        ("UTMASTG.4D [UR8], [UR4]", "async_copy"),
        ("LDGDEPBAR", "barrier"),
        ("DEPBAR.LE SB0, 0x0", "barrier"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "barrier"),
        ("WARPSYNC 0xffffffff", "barrier"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2", "barrier"),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "barrier"),
        ("MEMBAR.ALL.GPU", "barrier"),
        ("LDL.64 R4, [R1+0x8]", "local"),
        ("STL [R1], R4", "local"),
        ("BRA 0x2e70", "branch"),
        ("@P0 BRA 0x2e70", "branch_predicated"),
        ("@!UP0 BRA 0x2e70", "branch_predicated"),
        ("BRA.U !UP0, 0x2e70", "branch_predicated"),
        ("BRA P1, 0x2e70", "branch_predicated"),
        ("BRA.DIV ~URZ, 0x2e70", "branch_predicated"),
        ("BRX R2 -0x120", "branch"),
        ("EXIT", "branch"),
        ("@P0 EXIT", "branch_predicated"),
        ("CALL.REL.NOINC 0x3000", "branch"),
        ("RET.REL.NODEC R2 0x0", "branch"),
        ("BSSY.RECONVERGENT B0, 0x3060", "converge"),
        ("BSYNC B0", "converge"),
        ("@P0 FADD R1, R2, R3", "fma"),
        ("USETMAXREG.DEALLOC.CTAPOOL 0x18", "other"),
        ("NANOSLEEP 0x20", "other"),
        ("LDSOMETHINGNEW R1, [R2]", "other"),
        ("FROBNICATE R1", "other"),
    ],
)
def test_class_of_an_instruction(text: str, expected: str) -> None:
    assert sass.classify(instruction(text)) == expected
    assert expected in CLASSES
    assert instruction(text).text == text


@pytest.mark.parametrize("arch", ARCHS)
def test_every_class_is_found_in_real_machine_code(everything: Path, arch: str) -> None:
    cubin = compiler.compile_file(everything, entry="kernel", arch=arch, defines={})
    counts = sass.mix(cubin.code)
    absent = {name for name, count in counts.items() if not count} - {"converge"}  # the compiler may predicate instead
    assert absent == ({"other", "async_copy"} if capability(arch) < (8, 0) else {"other"})
    assert counts["tensor"] == 1
    assert counts["mufu"] >= 1
    assert list(counts) == list(CLASSES)
    assert counts["total"] == sum(count for name, count in counts.items() if name != "total")


@pytest.mark.parametrize("arch", ARCHS)
def test_addresses_and_predicates_are_those_of_the_code(everything: Path, arch: str) -> None:
    cubin = compiler.compile_file(everything, entry="kernel", arch=arch, defines={})
    instructions = sass.disassemble(cubin.code)
    assert [i.address for i in instructions] == list(range(0, 16 * len(instructions), 16))
    assert any(i.predicate and i.predicate.startswith("@!") for i in instructions)
    kept = sass.without_padding(instructions)
    assert {i.opcode for i in instructions if i not in kept} <= {"NOP", "BRA"}
    assert any(i.opcode == "EXIT" for i in kept)


@tiers
@pytest.mark.parametrize("stage", CUDA_STAGES.values(), ids=CUDA_STAGES)
def test_every_opcode_of_every_stage_has_a_class(stage: Stage, whole: bool) -> None:
    """On Hopper in every type under the causal mask, elsewhere what test_compiler.py compiles: masks alternate.

    In part, one kernel for Hopper, which the stage's page shows; of what 03_anatomy.ipynb compiles for every
    architecture, also the oldest's and the newest's.
    """
    every = [job for job in compiler.jobs([stage]) if job.head_dim == stage.head_dims[0]]
    if whole:
        work = [job for job in a_variant_elsewhere(every) if job.causal or job.arch != "sm_90a"]
        assert {job.arch for job in work} == set(stage.archs)
    else:
        archs = {"sm_90a", *((stage.archs[0], stage.archs[-1]) if stage.id in REPORTED else ())}
        work = [job for job in every if job.arch in archs and job.dtype == stage.dtypes[0] and not job.causal]
        assert {job.arch for job in work} == archs
    for job, cubin in zip(work, compiler.compile_many(work), strict=True):
        assert isinstance(cubin, Cubin), cubin
        counts = sass.mix(cubin.code, cubin.entry)
        instructions = sass.without_padding(sass.disassemble(cubin.code))
        unknown = [
            i.text for i in instructions if sass.classify(i) == "other" and i.opcode.split(".")[0] not in EXPLAINED
        ]
        assert not unknown, job.label
        assert counts["other"] <= 0.01 * counts["total"]
        assert counts["global_load"] + counts["async_copy"] > 0
        assert counts["global_store"] > 0
        if cubin.resources.spill_load_bytes:
            assert counts["local"] > 0


def test_one_kernel_of_several(tmp_path: Path) -> None:
    source = tmp_path / "two.cu"
    source.write_text(
        'extern "C" __global__ void adds(float* p) { p[0] += 1.0f; }\n'
        'extern "C" __global__ void roots(float* p) { p[0] = rsqrtf(p[0]); }\n',
        encoding="utf-8",
    )
    code = compiler.compile_file(source, entry="adds", arch="sm_90a", defines={}).code
    assert sass.mix(code, "adds")["mufu"] == 0
    assert sass.mix(code, "roots")["mufu"] == 1
    assert sass.mix(code)["total"] == sass.mix(code, "adds")["total"] + sass.mix(code, "roots")["total"]
    with pytest.raises(ParameterError, match=r"entry: wanted a kernel of .*, got 'subtracts'"):
        sass.mix(code, "subtracts")


@pytest.mark.parametrize("code", [b"", b"not a cubin", b"\x7fELF" + b"\0" * 200], ids=["empty", "text", "zeros"])
def test_what_is_no_cubin_is_refused(code: bytes) -> None:
    with pytest.raises(ParameterError, match="code: wanted a cubin"):
        sass.mix(code)


def test_a_missing_disassembler_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    sass._nvdisasm.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda *_, **__: None)
        with pytest.raises(MissingPackageError, match="pip install nvidia-cuda-nvdisasm"):
            sass.disassemble(b"anything")
    sass._nvdisasm.cache_clear()


def test_a_disassembler_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "nvdisasm"
    old.write_text("#!/bin/sh\necho \"nvdisasm fatal   : Unknown option '-emit-json'\" >&2\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    monkeypatch.setattr(sass, "_nvdisasm", lambda: str(old))
    with pytest.raises(MissingPackageError, match="too old"):
        sass.disassemble(b"something else")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("pair", ["f16x2", "ftz.bf16x2"])
def test_a_pair_of_exponentials_is_two_instructions(arch: str, pair: str, tmp_path: Path) -> None:
    """Why no kernel here takes them (site/levers.md)."""
    source = tmp_path / "pair.cu"
    source.write_text(
        'extern "C" __global__ void pair(unsigned* x) { asm volatile("ex2.approx.'
        + pair
        + ' %0, %0;" : "+r"(x[threadIdx.x])); }\n',
        encoding="utf-8",
    )
    code = compiler.compile_file(source, entry="pair", arch=arch, defines={})
    assert sum(one.opcode.startswith("MUFU.EX2") for one in sass.disassemble(code.code, "pair")) == 2
