"""Load a model for the fused path: packed weights and compiled kernels from the cache, or made and put there."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstage.cgroups import usable_cpus
from twinstage.errors import ModelError, NotFusible, TwinstageError
from twinstage.models import apart
from twinstage.models.config_files import effective_max_model_len, read_json_object
from twinstage.models.fused.artifacts import Artifact
from twinstage.models.fused.attention_work import AttentionShape
from twinstage.models.fused.formats import WeightFormat, format_of, has_bfloat16_dot, kv_dtype_of
from twinstage.models.fused.memory import AlignedMemory, Memory
from twinstage.models.fused.model import FusedModel
from twinstage.models.fused.native import LoadedProgram, NativeProgram
from twinstage.models.fused.spec import check_config
from twinstage.models.fused.target import missing_features, target
from twinstage.models.fused.trial import NotComparedError, read_verdict, try_model
from twinstage.models.fused.weights import PackedWeights, pack_model
from twinstage.models.resolve import ResolvedModel, default_cache_directory
from twinstage.telemetry.log import get_logger

logger = get_logger(__name__)

_PACKING_SOURCES = (
    "affine.py",
    "checkpoint.py",
    "fields.py",
    "formats.py",
    "native.py",
    "packing.py",
    "spec.py",
    "weights.py",
)
# What takes no part in compiling; a change to any other file of this package gives other kernels.
NOT_COMPILED = (
    "artifacts.py",
    "buffers.py",
    "checkpoint.py",
    "load.py",
    "memory.py",
    "model.py",
    "spec.py",
    "team.py",
    "trial.py",
    "weights.py",
)


def check_fusible(resolved: ResolvedModel) -> None:
    """Raise NotFusible, naming the reason, when model or machine are not what the fused path is made for."""
    lacking = missing_features()
    if lacking:
        raise NotFusible(f"this machine lacks {lacking}")
    try:
        check_config(read_json_object(resolved.directory / "config.json"))
    except NotFusible as error:
        raise NotFusible(f"{resolved.name} cannot run on the fused path: {error}") from None


def load_fused(
    resolved: ResolvedModel,
    *,
    precision: str,
    kv_dtype: str | None = None,
    threads: int | None = None,
    max_model_len: int | None = None,
    cache_directory: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> FusedModel:
    """Load with weights of `precision`, "fp32" or "int8", and KV in `kv_dtype`, on `threads` threads or all CPUs.

    `kv_dtype` None is float32 with fp32, and with int8 the 16-bit format that this machine multiplies fastest.
    What the cache lacks is made by another process where that spares this one memory (`models/apart.py`).
    Raises NotFusible, ModelError and ConfigError.
    """
    report = progress or (lambda _message: None)
    check_fusible(resolved)
    config = read_json_object(resolved.directory / "config.json")
    limit = effective_max_model_len(config, max_model_len)
    kv_dtype = kv_dtype or kv_dtype_of(precision)
    cache = cache_directory or default_cache_directory()
    making = _Making(
        resolved=resolved,
        weight_format=format_of(precision, config),
        cache=cache,
        report=report,
        fill=_filler(resolved, precision=precision, kv_dtype=kv_dtype, threads=threads, cache=cache, report=report),
    )
    packed, weights_key = making.weights()
    shape = _shape_of(packed, making.weight_format, kv_dtype)
    program, kernels_key = making.kernels(shape)
    model = FusedModel(
        packed,
        program,
        weight_format=making.weight_format,
        attention=shape,
        max_model_len=limit,
        fingerprint=resolved.fingerprint,
        artifacts=f"kernels {kernels_key} weights {weights_key}",
        threads=threads or usable_cpus(),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(model.close)
        if refusal := making.refusal_of(model, weights_key, kernels_key):
            raise NotFusible(refusal)
        stack.pop_all()
    return model


def _shape_of(packed: PackedWeights, weight_format: WeightFormat, kv_dtype: str) -> AttentionShape:
    return AttentionShape(
        num_heads=packed.spec.num_heads,
        num_kv_heads=packed.spec.num_kv_heads,
        head_dim=packed.spec.head_dim,
        dtype=kv_dtype,
        bfloat16_dot=has_bfloat16_dot(weight_format, kv_dtype),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Making:
    """Takes what a model needs from the cache, or makes it and puts it there; `fill` has another process do so."""

    resolved: ResolvedModel
    weight_format: WeightFormat
    cache: Path
    report: Callable[[str], None]
    fill: _Filler | None

    def weights(self) -> tuple[PackedWeights, str]:
        """Packed weights, and the key by which the cache knows them."""
        key = digest(sources(_PACKING_SOURCES), self.resolved.fingerprint, self.weight_format, str(target().panel))
        with _refusing(f"the weights of {self.resolved.name} cannot be packed"):
            packed = Artifact(directory=self.cache, kind="weights", name=self._name, key=key).load_or_make(
                lambda: pack_model(self.resolved.directory, self.weight_format, progress=self.report),
                lambda memory: PackedWeights.of(memory, self.weight_format),
                fill=self.fill,
            )
        return packed, key

    def kernels(self, shape: AttentionShape) -> tuple[LoadedProgram, str]:
        """The compiled step, and its key."""
        with _refusing("its kernels cannot be compiled on this machine"):
            key = kernel_key(self.weight_format, shape)
            program = Artifact(directory=self.cache, kind="kernels", name=self.weight_format, key=key).load_or_make(
                lambda: _compile(self.weight_format, shape, self.report),
                lambda memory: NativeProgram.from_bytes(memory.view()),
                fill=self.fill,
            )
            return LoadedProgram(program), key

    def refusal_of(self, model: FusedModel, weights_key: str, kernels_key: str) -> str:
        """Why the model must not be used: it computes something else than the stock one. Empty when it may be."""
        verdict = Artifact(
            directory=self.cache,
            kind="trials",
            name=self._name,
            key=digest(sources(("trial.py",)), weights_key, kernels_key),
        )
        try:
            return verdict.load_or_make(lambda: self._compare(model), read_verdict, fill=self.fill)
        except NotComparedError as error:  # it is used unproved, and compared by a start that can
            logger.warning("the model was not compared with the stock one", model=self.resolved.name, error=str(error))
            return ""

    def _compare(self, model: FusedModel) -> Memory:
        if self.fill is not None and self.fill.has_run:  # what did not fit beside it there fits here even less
            raise NotComparedError("the process that prepared the model could not run the stock one")
        return try_model(model, self.resolved.directory, name=self.resolved.name, report=self.report)

    @property
    def _name(self) -> str:
        return f"{Path(self.resolved.name).name}-{self.weight_format}"


class _Filler:
    """Has another process fill the cache, the first time it is called."""

    def __init__(self, arguments: Mapping[str, Any], *, what: str, report: Callable[[str], None]) -> None:
        self._arguments, self._what, self._report = arguments, what, report
        self.has_run = False

    def __call__(self) -> None:
        if not self.has_run:
            self.has_run = True
            apart.make_apart("load_fused", self._arguments, what=self._what, progress=self._report)


def _filler(
    resolved: ResolvedModel,
    *,
    precision: str,
    kv_dtype: str,
    threads: int | None,
    cache: Path,
    report: Callable[[str], None],
) -> _Filler | None:
    """What has another process fill the cache; None where that is no use."""
    if not apart.is_worth_it():
        return None
    arguments = {
        "directory": str(resolved.directory),
        "name": resolved.name,
        "fingerprint": resolved.fingerprint,
        "precision": precision,
        "kv_dtype": kv_dtype,
        "threads": threads,
        "cache_directory": str(cache),
    }

    return _Filler(arguments, what=f"{resolved.name} cannot be prepared", report=report)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn errors of libraries, which are of any kind, into NotFusible: the model can run as stock modules."""
    try:
        yield
    except TwinstageError:
        raise
    except Exception as error:
        raise NotFusible(f"{what}: {type(error).__name__}: {error}") from error


def kernel_key(weight_format: WeightFormat, shape: AttentionShape) -> str:
    """Identifies compiled kernels by all that they depend on: their source, the compiler and the CPU."""
    import llvmlite.binding as llvm

    versions = [f"{package}={importlib.metadata.version(package)}" for package in ("numba", "llvmlite")]
    chosen = target()
    return digest(
        sources(("*.py",), without=NOT_COMPILED),
        weight_format,
        repr(shape),
        *versions,
        str(llvm.llvm_version_info),
        chosen.cpu,
        chosen.features,
    )


def _compile(weight_format: WeightFormat, shape: AttentionShape, report: Callable[[str], None]) -> AlignedMemory:
    report("compiling kernels, once for this machine")
    # Numba takes a second to import, and what it compiles is needed only here.
    from twinstage.models.fused.compile import compile_program

    return AlignedMemory.of(compile_program(weight_format, shape).to_bytes())


def sources(patterns: tuple[str, ...], *, without: tuple[str, ...] = (), directory: Path | None = None) -> str:
    """The text of source files of this package, or of those in `directory`."""
    here = directory or Path(__file__).parent
    paths = sorted({path for pattern in patterns for path in here.glob(pattern) if path.name not in without})
    if not paths:
        raise ModelError(f"{here} has no source files, by which compiled kernels are known")
    return "".join(f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in paths)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
