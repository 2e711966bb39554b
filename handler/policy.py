"""Observations in, action chunks out: the checkpoint's processing around one forward of the network.

`check` -> `prepare` -> `predict` is the path of a request; `get_action` walks it for one observation in process.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from handler.embodiment import Embodiment, Float32, load_embodiments
from handler.gr00t import kernels
from handler.gr00t.checkpoint import CheckpointError, content_hash, load_model, read_json, weight_files
from handler.gr00t.engine import Engine, Fused, HostRow, frame_values, image_tokens, padded_length
from handler.gr00t.model import Batch, Gr00tConfig, Grid, cut_patches, mrope_positions, velocity_scale
from handler.observation import Limits, Observation, check
from handler.problem import Problem
from handler.prompt import PromptEncoder, load_tokenizer
from handler.resize import Resizer
from handler.transforms import PREPARED, ImageRecipe, Size, image_grid
from handler.wire import pointer

logger = logging.getLogger(__name__)

Actions = dict[str, Float32]

# What the model config's words mean as arguments of `Gr00tPolicy`.
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
ENGINES = {"auto": None, "fused": True, "plain": False}

REPRODUCIBLE_ROWS = 8  # the one row count of reproducible mode
MAX_PINNED = 64 << 20  # bytes of a request's frames; 32 rows with two of 640x480 have 59 million


@dataclass(frozen=True)
class Row:
    """One robot's row, ready for the network.

    Attributes:
        embodiment: chooses the weight set and how the chunk is decoded.
        grids: patch grids of its images, in (timestep, camera) order; rows join one forward when these agree.
        frames: its cameras' frames, uint8 (H, W, 3) each, in that order, as one flat tensor; sizes: their (H, W).
        prepared: the client took the frames through the recipe; see `handler.observation`.
        input_ids, positions: int64 (L,) and (3, L).
        state: float32 (T * max_state_dim,), normalised.
        raw_state: {key: float32 (T, width)}, physical units; relative actions refer to its last row.
        seed: of its noise.
        prefix: float32 (overlap, max_action_dim) for real-time chunking, or None.
        frozen: {key: float32 (frozen steps, width)}, the rows that the new chunk must repeat.
        ramp_rate: real-time chunking.
    """

    embodiment: Embodiment
    grids: tuple[Grid, ...]
    frames: torch.Tensor
    sizes: tuple[Size, ...]
    prepared: bool
    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    state: Float32
    raw_state: dict[str, Float32]
    seed: int
    prefix: Float32 | None
    frozen: dict[str, Float32]
    ramp_rate: float

    @property
    def frozen_steps(self) -> int:
        return len(next(iter(self.frozen.values()), ()))


class TooManyTokens(ValueError):
    """A row's tokens are over the limit; the text is their number."""


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed, up to 64 MB a block: frames come and go at every step, and fetching their pages
    from the kernel anew costs more than resizing them. Without effect elsewhere."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(-3, 64 << 20):  # M_MMAP_THRESHOLD
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD


def _absurd(normalized: Float32) -> bool:
    """Values that only a broken sensor or client sends: not finite, or a million times the range of the training."""
    return not bool((np.abs(normalized) <= 1e6).all())


def stacked(rows: Sequence[Actions]) -> Actions:
    """Rows' {key: (horizon, width)} -> {key: (B, horizon, width)}; one row is not copied."""
    if len(rows) == 1:
        return {key: value[None] for key, value in rows[0].items()}
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def processor_folder(checkpoint: Path) -> Path:
    """Where a checkpoint has its processor files: in `processor/`, or at its top."""
    folder = checkpoint / "processor"
    return folder if (folder / "processor_config.json").is_file() else checkpoint


def read_processor(
    folder: Path, tag: str | None, config: Gr00tConfig
) -> tuple[dict[str, Embodiment], str | None, bool, ImageRecipe]:
    """The embodiments that can be served, the tag of requests that name none, whether instructions are formalized, and
    the image recipe, from a folder's processor files.

    tag: to be that of requests that name none. config: the network's.

    Raises:
        CheckpointError: a file is missing or unusable, or nothing can be served, or not `tag`.
    """
    kwargs = read_json(folder, "processor_config.json").get("processor_kwargs")
    if not isinstance(kwargs, dict) or not isinstance(kwargs.get("modality_configs"), dict):
        raise CheckpointError("processor_config.json has no processor_kwargs with modality_configs")
    if kwargs.get("use_tactile"):
        raise CheckpointError("processor_config.json: use_tactile is set; tactile checkpoints are not supported")
    ids = read_json(folder, "embodiment_id.json") if (folder / "embodiment_id.json").is_file() else {}
    served, refused = load_embodiments(kwargs, read_json(folder, "statistics.json"), ids)
    for name, embodiment in list(served.items()):
        if reason := _misfit(embodiment, config):
            refused[name] = reason
            del served[name]
    for name, reason in refused.items():
        logger.warning("embodiment %s is not served: %s", name, reason)
    if not served:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:4])
        raise CheckpointError(f"no embodiment of this checkpoint can be served: {reasons or 'there is none'}")
    if tag is not None and tag not in served:
        raise CheckpointError(
            f"embodiment {tag!r} cannot be served: {refused.get(tag, 'the checkpoint does not have it')}; "
            f"it has {', '.join(served)}"
        )
    try:
        recipe = ImageRecipe.from_json(kwargs)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"processor_config.json: {error}") from error
    default = tag or (next(iter(served)) if len(served) == 1 else None)
    return served, default, bool(kwargs.get("formalize_language", True)), recipe


def _misfit(embodiment: Embodiment, config: Gr00tConfig) -> str | None:
    """Why an embodiment does not fit this network, if it does not."""
    state = sum(group.encoded_width for group in embodiment.states)
    action = sum(group.width for group in embodiment.actions)
    for name, needed, room in (
        ("state width", state, config.max_state_dim),
        ("action width", action, config.max_action_dim),
        ("horizon", embodiment.horizon, config.action_horizon),
        ("id", embodiment.id + 1, config.max_num_embodiments),
    ):
        if needed > room:
            return f"its {name} needs {needed}, the model has room for {room}"
    if embodiment.state_steps != config.state_history_length:
        return f"it has {embodiment.state_steps} state rows, the model takes {config.state_history_length}"
    return None


class Gr00tPolicy:
    """A checkpoint, loaded on one device. `check` and `prepare` may run in many threads, `predict` in one.

    Args:
        checkpoint: the folder, in the published layout; processor files may sit in its `processor/`.
        device: where the network runs.
        dtype: of weights and activations; by default bfloat16 on CUDA and float32 elsewhere.
        embodiment_tag: what a request means that names no embodiment; by default the checkpoint's only one, if so.
        tokenizer: a folder with the backbone's `tokenizer.json`, when the checkpoint has none.
        limits: see `Limits`.
        engine: run the fused network, from CUDA graphs on a GPU, in place of the plain one; None: where that was
            measured and verified, in bfloat16 on a Hopper GPU.
        reproducible: one shape for every wave, so that a row's bits do not depend on its company.
        turn: held while the device computes, see `handler.turn`.

    Raises:
        CheckpointError: the folder cannot be served; the text says why.
    """

    def __init__(
        self,
        checkpoint: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        embodiment_tag: str | None = None,
        tokenizer: Path | None = None,
        limits: Limits | None = None,
        engine: bool | None = False,
        reproducible: bool = False,
        turn: AbstractContextManager[None] | None = None,
    ) -> None:
        start = time.perf_counter()
        if not checkpoint.is_dir():
            raise CheckpointError(f"the checkpoint folder {checkpoint} does not exist")
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # where Triton launches
        self.dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.limits = limits or Limits()
        weights = weight_files(checkpoint)
        config = processor_folder(checkpoint)
        if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
            raise CheckpointError("the tokenizer folder has no tokenizer.json")
        words = load_tokenizer([tokenizer] if tokenizer else [checkpoint, checkpoint / "processor"])
        names = ("processor_config.json", "statistics.json", "embodiment_id.json")
        files = [*weights, checkpoint / "config.json", *(config / name for name in names if (config / name).is_file())]
        with ThreadPoolExecutor(1) as pool:  # hashing reads what loading reads, so side by side it costs little
            digest = pool.submit(content_hash, files, words.to_str().encode())
            self.model = load_model(checkpoint, self.device, self.dtype)
            self.embodiments, self.default_tag, self.formalize_language, self.recipe = read_processor(
                config, embodiment_tag, self.model.config
            )
            self.encode_prompt = PromptEncoder(words, self.model.config.image_token_id, self.formalize_language)
            self.checkpoint = digest.result()
        self.config = self.model.config
        self.reproducible = reproducible
        self.turn = turn or nullcontext()
        self.work: Counter[tuple[str, str]] = Counter()  # see `_account`
        self.resizer = Resizer(self.recipe, self.device)
        self.rows_per_forward = min(REPRODUCIBLE_ROWS, self.limits.max_rows) if reproducible else self.limits.max_rows
        self.engine: Engine | None = None
        if engine is None:
            hopper = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] == 9
            engine = hopper and self.dtype == torch.bfloat16 and kernels.triton is not None
        if engine:
            ids = list(dict.fromkeys(e.id for e in self.embodiments.values()))
            self.weight_set = {identity: index for index, identity in enumerate(ids)}
            if self.device.type == "cuda" and self.dtype != torch.bfloat16:
                raise CheckpointError("engine: its kernels are for bfloat16; set dtype: auto, or engine: plain")
            rungs = [self.rows_per_forward] if reproducible else None
            fused = Fused(self.model, ids, self.encode_prompt.lead)
            self.engine = Engine(fused, self.resizer, self.rows_per_forward, rungs, turn=self.turn)
            del self.model  # the engine has what it needs, and other embodiments' weights go
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if self.device.type == "cuda":
            keep_freed_memory()
        self.tokens = lru_cache(maxsize=1024)(self._tokens)  # robots repeat their instruction at every step
        self.load_seconds = time.perf_counter() - start

    # ------------------------------------------------------------------------------------------- a request's path

    def check(self, fields: Mapping[str, Any]) -> Observation:
        """A request's mapping -> a checked observation. Raises Problem; see `handler.observation`."""
        return check(fields, self.embodiments, self.default_tag, self.limits)

    def prepare(self, observation: Observation) -> list[Row]:
        """The observation's rows, ready for the network.

        Raises:
            Problem: 422 an image that the recipe cannot take, 413 too many tokens.
        """
        c, e = self.config, observation.embodiment
        sizes = [observation.video[camera].shape[2:4] for camera in e.cameras]
        prepared = self._prepared(observation)
        recipe = PREPARED if prepared else self.recipe
        grids = []
        for camera, size in zip(e.cameras, sizes, strict=True):
            try:
                if prepared and not self.recipe.makes(*size):
                    raise ValueError(
                        f"{size[0]} x {size[1]} (height x width) does not come out of the recipe that "
                        "options.prepared_with names; send what comes out of it, or the camera's own without the option"
                    )
                grids.append(image_grid(size, recipe, c.vision))
            except ValueError as error:
                raise Problem(422, f"this image cannot be used: {error}", observation.where.get(f"video.{camera}")
                              ) from None
        row_grids, row_sizes = tuple(grids) * e.frames, tuple(sizes) * e.frames  # (timestep, camera) order
        seed = secrets.randbits(32) if observation.seed is None else observation.seed
        states = e.encode_state(observation.state, c.max_state_dim)
        if _absurd(states):
            key = next(g.key for g in e.states if _absurd(g.encode(observation.state[g.key])))
            raise Problem(422, f"state {key!r} lies too far outside the checkpoint's statistics",
                          observation.where.get(f"state.{key}"))  # fmt: skip
        rows: list[Row] = []
        images, most = image_tokens(row_grids, c.vision), self.limits.max_tokens
        if images > most:
            largest = e.cameras[int(np.argmax([height * width for height, width in grids]))]
            raise Problem(
                413,
                f"the images of a row have {images} tokens; at most {most} are allowed, with those of the instruction: "
                "send images of another shape",
                observation.where.get(f"video.{largest}"),
            )
        frames = self._pack([observation.video[camera][:, t] for t in range(e.frames) for camera in e.cameras])
        for b, instruction in enumerate(observation.instructions):
            try:
                ids, positions = self.tokens(instruction, row_grids)
            except TooManyTokens as error:
                raise Problem(
                    413,
                    f"this row has {error} tokens ({images} of images); at most {most} are allowed: shorten the "
                    "instruction",
                    observation.where.get("language"),
                ) from None
            raw_state = {key: value[b] for key, value in observation.state.items()}
            rtc = observation.rtc
            prefix, frozen = None, {}
            if rtc is not None:
                chunk = {key: value[b, -rtc.overlap_steps :] for key, value in rtc.action.items()}
                prefix = e.encode_prefix(chunk, raw_state, c.max_action_dim)
                frozen = {key: value[: rtc.frozen_steps] for key, value in chunk.items()}
                if _absurd(prefix):
                    raise Problem(422, "the previous chunk lies too far outside the checkpoint's statistics",
                                  pointer("options", "rtc", "action"))
            rows.append(
                Row(
                    embodiment=e,
                    grids=row_grids,
                    frames=frames[b],
                    sizes=row_sizes,
                    prepared=prepared,
                    input_ids=ids,
                    positions=positions,
                    state=states[b].reshape(-1),
                    raw_state=raw_state,
                    seed=seed + b,
                    prefix=prefix,
                    frozen=frozen,
                    ramp_rate=rtc.ramp_rate if rtc else 0.0,
                )
            )

        return rows

    def _prepared(self, observation: Observation) -> bool:
        """Whether the client took the frames through the recipe. Raises Problem 422 when it was another one."""
        if observation.prepared_with is None:
            return False
        own = self.recipe.describe()
        if observation.prepared_with != own:
            raise Problem(422, f"options.prepared_with is not this checkpoint's recipe, {json.dumps(own)}: prepare the "
                          "frames with that, or send the camera's own without this option",
                          pointer("options", "prepared_with"))  # fmt: skip
        return True

    def _pack(self, frames: Sequence[NDArray[np.uint8]]) -> torch.Tensor:
        """Frames uint8 (B, H, W, 3) each -> a copy (B, values), those of a row one after the other; on a GPU, where it
        has room, on the way to it.

        They leave from pinned memory. PyTorch keeps such memory for the next request and never gives it back, so
        requests with very large frames get none.
        """
        rows, values = len(frames[0]), [frame[0].size for frame in frames]
        upload = not self.resizer.on_host
        shape = (rows, sum(values))
        try:
            packed = torch.empty(shape, dtype=torch.uint8, pin_memory=upload and math.prod(shape) <= MAX_PINNED)
        except RuntimeError:  # the host has no more of it; a lost GPU will tell below
            packed = torch.empty(shape, dtype=torch.uint8)
        host, at = packed.numpy(), accumulate(values, initial=0)
        for frame, (start, end) in zip(frames, pairwise(at), strict=True):
            host[:, start:end].reshape(frame.shape)[...] = frame
        if not upload:
            return packed
        try:
            return packed.to(self.device, non_blocking=True)
        except torch.OutOfMemoryError:  # there may be room when its wave runs; if not, that answers for it
            return packed

    def _tokens(self, instruction: str, grids: tuple[Grid, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids (L,) and positions (3, L) of an instruction after images with these grids."""
        c = self.config
        ids = torch.tensor(self.encode_prompt(instruction, [image_tokens((grid,), c.vision) for grid in grids]))
        if len(ids) > self.limits.max_tokens:
            raise TooManyTokens(len(ids))  # raised, and so not remembered
        positions = mrope_positions(ids == c.image_token_id, grids, c.vision.spatial_merge_size)
        return ids.numpy(), positions.numpy()

    def predict(self, rows: Sequence[Row]) -> list[Actions | Problem]:
        """ONE forward over rows that may differ in embodiment, prompt length and options.

        Returns:
            Per row its {key: float32 (horizon, width)} in physical units, or a Problem when the network's answer is
            not finite.
        """
        chunks = np.empty((len(rows), self.config.action_horizon, self.config.max_action_dim), np.float32)
        for at in self._forwards(rows):
            together = [rows[b] for b in at]
            self._account(together)
            chunks[at] = self._run_engine(together) if self.engine else self._run_model(together)
        out: dict[int, Actions | Problem] = {}
        for embodiment in {id(row.embodiment): row.embodiment for row in rows}.values():
            at = [b for b, row in enumerate(rows) if row.embodiment is embodiment]
            needed = {g.relative_to for g in embodiment.actions if g.relative_to is not None}
            states = {key: np.stack([rows[b].raw_state[key] for b in at]) for key in needed}
            joined = embodiment.decode_action(chunks[at], states)
            numbers = [values.reshape(len(at), -1) for values in (chunks[at], *joined.values())]
            finite = np.asarray(np.isfinite(np.concatenate(numbers, axis=1)).all(axis=1))
            for n, b in enumerate(at):
                if finite[n]:
                    out[b] = actions = {key: value[n] for key, value in joined.items()}
                    for key, frozen in rows[b].frozen.items():
                        # The network kept them, but normalised, and so clipped to the statistics' range; the robot is
                        # already on its way along these very rows.
                        actions[key][: len(frozen)] = frozen
                else:
                    out[b] = Problem(500, "the network's answer to this observation is not finite; no action is sent",
                                     reason="not_finite")  # fmt: skip
        return [out[b] for b in range(len(rows))]

    def shape(self, row: Row) -> Any:
        """Rows of one shape share a forward: their grids, and in reproducible mode their token rung too."""
        if not self.reproducible:
            return row.grids
        return row.grids, padded_length(row.grids, len(row.input_ids), self.config.vision)

    def _forwards(self, rows: Sequence[Row]) -> list[list[int]]:
        """Which rows run together: all, but the engine takes one set of grids, and reproducible mode one shape."""
        if not (self.engine or self.reproducible):
            return [list(range(len(rows)))]
        groups: dict[Any, list[int]] = {}
        for b, row in enumerate(rows):
            groups.setdefault(self.shape(row), []).append(b)
        most = self.rows_per_forward if self.reproducible else len(rows)
        return [group[first : first + most] for group in groups.values() for first in range(0, len(group), most)]

    def _account(self, rows: Sequence[Row]) -> None:
        """Adds a forward that begins to `work`: its rows and tokens, and those that it is padded with."""
        lengths = [len(row.input_ids) for row in rows]
        rows_run, tokens_run = len(rows), max(lengths)
        if self.reproducible:
            rows_run = self.rows_per_forward
        elif self.engine:
            rows_run = self.engine.rows(rows_run)
        if self.reproducible or self.engine:
            tokens_run = padded_length(rows[0].grids, tokens_run, self.config.vision)
        self.work["forwards", str(rows_run)] += 1
        self.work["rows", "real"] += len(rows)
        self.work["rows", "padding"] += rows_run - len(rows)
        self.work["tokens", "real"] += sum(lengths)
        self.work["tokens", "padding"] += rows_run * tokens_run - sum(lengths)

    def _run_model(self, rows: Sequence[Row]) -> Float32:
        """(n, H, A) from the plain network; in reproducible mode padded to the one shape."""
        tokens, padded = 0, list(rows)
        if self.reproducible:
            tokens = padded_length(rows[0].grids, len(rows[0].input_ids), self.config.vision)
            padded += [rows[0]] * (self.rows_per_forward - len(rows))
        with self.turn:
            return self.model(self._batch(padded, tokens)).float().cpu().numpy()[: len(rows)]

    def _run_engine(self, rows: Sequence[Row]) -> Float32:
        """(n, H, A) from the engine."""
        assert self.engine is not None
        hosts = [
            HostRow(
                row.frames, row.sizes, row.prepared, row.input_ids, row.positions, row.state,
                self.weight_set[row.embodiment.id], row.seed, row.prefix,
                None if row.prefix is None else self._velocity_scale(row),
            )
            for row in rows
        ]  # fmt: skip
        return self.engine(hosts, rows[0].grids, self.rows_per_forward if self.reproducible else None)

    def _velocity_scale(self, row: Row) -> torch.Tensor:
        assert row.prefix is not None
        return velocity_scale(self.config.action_horizon, row.frozen_steps, len(row.prefix), row.ramp_rate)

    def get_action(self, observation: Mapping[str, Any]) -> dict[str, Float32]:
        """The whole path for one observation of B rows, in process.

        Args:
            observation: as a request's body, see `handler.observation`; `options` may hold seed, rtc, embodiment_tag.

        Returns:
            {key: float32 (B, horizon, width)} in physical units.

        Raises:
            Problem: the observation breaks the contract, or its answer is not finite.
        """
        results = []
        for result in self.predict(self.prepare(self.check(observation))):
            if isinstance(result, Problem):
                raise result
            results.append(result)
        return stacked(results)

    # --------------------------------------------------------------------------------------------------- the batch

    def _batch(self, rows: Sequence[Row], tokens: int = 0) -> Batch:
        """The rows as one batch, at least `tokens` wide."""
        c, device, dtype = self.config, self.device, self.dtype
        lengths = [len(row.input_ids) for row in rows]
        ids = np.zeros((len(rows), max(tokens, *lengths)), np.int64)
        positions = torch.zeros(3, *ids.shape, dtype=torch.long)
        noise = torch.empty(len(rows), c.action_horizon, c.max_action_dim, dtype=dtype, device=device)
        scale = torch.ones(len(rows), c.action_horizon, 1)
        for b, row in enumerate(rows):
            ids[b, : lengths[b]] = row.input_ids
            positions[:, b, : lengths[b]] = torch.from_numpy(row.positions)
            # Each row alone, as the reference draws a single row: (1, H, A) on the device, in the compute dtype.
            generator = torch.Generator(device).manual_seed(row.seed)
            noise[b] = torch.randn((1, *noise.shape[1:]), generator=generator, device=device, dtype=dtype)[0]
            if row.prefix is not None:
                overlap = len(row.prefix)
                noise[b, :overlap] = torch.from_numpy(row.prefix).to(device, dtype)
                scale[b, :, 0] = self._velocity_scale(row)
        return Batch(
            input_ids=torch.from_numpy(ids).to(device),
            positions=positions.to(device),
            lengths=lengths,
            grids=[row.grids for row in rows],
            pixels=self._pixels(rows),
            state=torch.from_numpy(np.stack([row.state for row in rows])).to(device, dtype),
            embodiment_id=torch.tensor([row.embodiment.id for row in rows], device=device),
            noise=noise,
            velocity_scale=scale.to(device, dtype),
        )

    def _pixels(self, rows: Sequence[Row]) -> torch.Tensor:
        """The patches of all frames, one after the other: (P, values) in the compute dtype."""
        vision = self.config.vision
        cut: dict[int, torch.Tensor] = {}
        for grids in {row.grids for row in rows}:
            at = [b for b, row in enumerate(rows) if row.grids == grids]
            values = frame_values(grids, vision)
            images = torch.empty(len(at), sum(values), dtype=torch.uint8, device=self.device)
            frames, sizes, prepared = zip(*[(rows[b].frames, rows[b].sizes, rows[b].prepared) for b in at], strict=True)
            self.resizer(frames, sizes, prepared, images)
            patches = [
                cut_patches(piece.reshape(-1, h * vision.patch_size, w * vision.patch_size, 3), vision, self.dtype)
                for piece, (h, w) in zip(images.split(values, dim=1), grids, strict=True)
            ]
            for n, b in enumerate(at):
                cut[b] = torch.cat([patch[n] for patch in patches])
        return torch.cat([cut[b] for b in range(len(rows))])

    # ---------------------------------------------------------------------------------------------------- the rest

    def warm_up(self) -> None:
        """Answers an example of each embodiment: the first forward is slow, and shows broken weights.

        The engine also captures the ladder of each embodiment's example frames; cameras of another shape are captured
        when they first come.
        """
        self.resizer.warm_up()
        for tag in self.embodiments:
            example = self.example(tag)
            try:
                self.get_action(example)
            except Problem as problem:
                raise CheckpointError(f"an example of {tag} cannot be answered: {problem.detail}") from None
            if self.engine is not None and self.device.type == "cuda":
                self.engine.warm_up(self.prepare(self.check(example))[0].grids)

    def lost(self) -> bool:
        """Whether the CUDA context is beyond repair, as after a device-side assert; always False on a CPU.

        Frees cached memory on the way, which helps after running out of it.
        """
        if self.device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.zeros(1, device=self.device).item()
        except torch.OutOfMemoryError:
            return False
        except RuntimeError:
            return True
        return False

    def example(self, tag: str) -> dict[str, Any]:
        """An observation of one row that keeps the contract of an embodiment: grey frames, mid-range state."""
        e = self.embodiments[tag]
        state = {}
        for group in e.states:
            middle = np.broadcast_to((group.low + group.high) / 2, (e.state_steps, group.width))
            state[group.key] = middle[None].astype(np.float32)
        for action in e.actions:
            if action.pose == "xyz_rot6d" and action.relative_to is not None:
                state[action.relative_to][..., 3:] = (1, 0, 0, 0, 1, 0)
        return {
            "video": {camera: np.full((1, e.frames, 256, 256, 3), 128, np.uint8) for camera in e.cameras},
            "state": state,
            "language": {e.language_keys[0]: [["pick up the object"]]},
            "options": {"embodiment_tag": tag, "seed": 0},
        }

    def describe(self) -> dict[str, Any]:
        """The contract, for people and clients: embodiments, keys, shapes, dtypes, horizons, limits, an example.

        Plain JSON without nulls, which TorchServe would drop on the way.
        """
        embodiments = {}
        for tag, e in self.embodiments.items():
            embodiments[tag] = {
                "video": {
                    "keys": list(e.cameras), "frames": e.frames, "dtype": "uint8",
                    "shape": ["B", e.frames, "H", "W", 3],
                },
                "state": {
                    g.key: {"width": g.width, "steps": e.state_steps, "dtype": "float32",
                            "shape": ["B", e.state_steps, g.width]}
                    for g in e.states
                },
                "language": {"keys": list(e.language_keys), "shape": ["B", 1]},
                "action": {
                    g.key: {"width": g.width, "horizon": e.horizon, "dtype": "float32",
                            "shape": ["B", e.horizon, g.width], "representation": g.representation,
                            **({"relative_to": g.relative_to} if g.relative_to else {})}
                    for g in e.actions
                },
                "horizon": e.horizon,
                "delta_indices": e.deltas,
            }
        tag = self.default_tag or next(iter(self.embodiments))
        example = self.example(tag)
        return {
            "embodiments": embodiments,
            **({"default_embodiment": self.default_tag} if self.default_tag else {}),
            "limits": vars(self.limits),
            "image_recipe": self.recipe.describe(),
            "checkpoint": self.checkpoint,
            "dtype": str(self.dtype).removeprefix("torch."),
            "example": {
                "video": {key: "uint8 array, or base64 JPEG or PNG" for key in example["video"]},
                "state": {key: value.tolist() for key, value in example["state"].items()},
                "language": example["language"],
                "options": example["options"],
            },
        }
