"""GR00T N1.7 for one accelerator: the same network as `model`, fused, and replayed from CUDA graphs.

`Fused` computes what `model.Gr00t` computes, for rows whose images have the same patch grids, with everything constant
worked out beforehand: AdaLN scales and shifts of the four timesteps, the action encoder's time branch, rotary and
position tables of a grid, and keys and values of the cross-attention once per forward. `Engine` captures it as CUDA
graphs for a ladder of row counts and token lengths; a wave takes the smallest rung that holds it. The vision tower is a
graph of its own: it starts as soon as the frames are there. Meanwhile the host loads the rest, and another graph begins
what needs no image.

Shapes: R rows of a rung, L tokens of a rung, H action steps, A action width.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from handler.gr00t.kernels import Sums, add_norm, attend, gelu_linear, linear_split, rope_, silu_mul
from handler.gr00t.model import Gr00t, Grid, VisionConfig, cut_patches, text_rotary, vision_rotary

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

Grids = tuple[Grid, ...]
Resize = Callable[[Sequence[Tensor], Sequence[tuple[tuple[int, int], ...]], Sequence[bool], Tensor], None]
Key = tuple[Grids, int, int]  # a rung: grids, rows, tokens
Tables = dict[Grid, tuple[Tensor, Tensor, Tensor]]  # per distinct grid its position table and rotary cos and sin

# Into how many parts the feed-forward's second product (long K) and an attention's output product are split, by rows
# of tokens up to a bound; one part beyond the last. Measured on an H200 at the published widths.
FEED_FORWARD_SPLITS = ((128, 3), (256, 2), (512, 3), (1024, 2))
OUT_SPLITS = ((256, 1), (512, 2))

# Before which of the four steps the GPU is another worker's, where several share it: the last step of few rows leaves
# much of it idle. Measured on an H200.
TURN_ENDS = 3

# Up to how many images the vision tower's attention is our own kernel: cuDNN's, faster as such, clears a counter first.
OWN_ATTENTION_IMAGES = 8


@dataclass(frozen=True)
class Inputs:
    """One forward's input beside the frames, on the device; R and L are those of a rung.

    Attributes:
        input_ids: int64 (R, L), right-padded; positions: int64 (3, R, L).
        text_counts, counts: int32 (R,), each row's real tokens: those that are no image, and all.
        state: (R, state_history_length * max_state_dim) float32.
        embodiment: int64 (R,), into the engine's own weight sets.
        noise: (R, H, A), in the model's dtype; velocity_scale: (R, H, 1) float32.
    """

    input_ids: Tensor
    positions: Tensor
    text_counts: Tensor
    counts: Tensor
    state: Tensor
    embodiment: Tensor
    noise: Tensor
    velocity_scale: Tensor


@dataclass(frozen=True)
class Plan:
    """Where the image tokens and all other tokens stand in a row of L, int64: what its grids and token rung fix."""

    image_index: Tensor
    text_index: Tensor


@dataclass(frozen=True)
class Start:
    """What of a forward needs no image.

    Attributes:
        embedded: (R, L, width), image tokens still to come; cos, sin: (R * L, head_dim / 2), M-RoPE.
        weights: the rows' own, see `WeightSets`; state: (R, 1, width), encoded.
        own, image_counts: int32 (R,), keys of a trajectory, and a row's image tokens.
        trajectory: (R, 1 + H, width), the DiT's first input; speed: (R, H, 1), of a step.
    """

    embedded: Tensor
    cos: Tensor
    sin: Tensor
    weights: dict[str, Tensor]
    state: Tensor
    own: Tensor
    image_counts: Tensor
    trajectory: Tensor
    speed: Tensor


def frame_values(grids: Sequence[Grid], vision: VisionConfig) -> list[int]:
    """How many uint8 values each image of these grids has."""
    return [h * w * vision.patch_size**2 * vision.in_channels for h, w in grids]


def splits_of(table: Sequence[tuple[int, int]], x: Tensor) -> int:
    """How many parts of K for (rows, K); parts are multiples of 8 values, which the product's alignment needs."""
    splits = next((splits for rows, splits in table if x.shape[0] <= rows), 1)
    return splits if x.shape[1] % (8 * splits) == 0 else 1


def fuse(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Linear layers over one input as one: (weight, bias)."""
    weight = torch.cat([linear.weight for linear in linears])
    return weight, None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])


class WeightSets:
    """The per-embodiment weights, one row of a matrix per embodiment, so that one copy fetches a batch's own.

    weights: (embodiments, ...) each.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape[1:] for name, tensor in weights.items()}
        # Pieces begin at multiples of 64 values: products want aligned operands.
        pieces = [F.pad(t.flatten(1), (0, -t[0].numel() % 64)) for t in weights.values()]
        self.sizes = [piece.shape[1] for piece in pieces]
        self.joined = torch.cat(pieces, dim=1)

    def of(self, embodiment: Tensor) -> dict[str, Tensor]:
        """{name: (R, ...)} for rows of these embodiments, int64 (R,)."""
        pieces = self.joined.index_select(0, embodiment).split(self.sizes, dim=1)
        return {
            name: piece[:, : math.prod(shape)].unflatten(1, shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }


class Fused:
    """The network with fused weights.

    Args:
        model: its weights are taken over, not copied, where they need no fusing.
        embodiment_ids: the weight sets to keep, in the order that `Inputs.embodiment` counts.
        lead: tokens of every prompt before its first image's.
    """

    @torch.inference_mode()
    def __init__(self, model: Gr00t, embodiment_ids: Sequence[int], lead: int) -> None:
        c = self.config = model.config
        self.lead = lead
        # nn.Module attributes have no types to check: Tensor or Module, as far as mypy knows.
        qwen: Any = model.backbone.model.model
        head: Any = model.action_head
        self.vision: Any = qwen.visual
        self.dtype, self.device = head.vlln.weight.dtype, head.vlln.weight.device

        self.embed = qwen.language_model.embed_tokens.weight
        self.text = [
            (
                layer.input_layernorm,
                fuse(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)[0],
                (layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight, layer.self_attn.q_norm.eps),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm,
                fuse(layer.mlp.gate_proj, layer.mlp.up_proj)[0],
                layer.mlp.down_proj.weight,
            )
            for layer in qwen.language_model.layers
        ]
        self.vlln = head.vlln
        self.vl = [(b.norm1, fuse(b.attn1.to_q, b.attn1.to_k, b.attn1.to_v), b.attn1.to_out[0], b.norm3, b.ff.net)
                   for b in head.vl_self_attention.transformer_blocks]  # fmt: skip

        dit = head.model
        blocks = list(dit.transformer_blocks)
        period = dit.text_period
        self.text_layers = [i for i in range(0, len(blocks), 2) if i % period == 0]
        self.image_layers = [i for i in range(0, len(blocks), 2) if i % period]
        self.text_kv, self.image_kv = (
            fuse(*(linear for i in layers for linear in (blocks[i].attn1.to_k, blocks[i].attn1.to_v)))
            for layers in (self.text_layers, self.image_layers)
        )
        self.dit = [
            (
                fuse(b.attn1.to_q) if i % 2 == 0 else fuse(b.attn1.to_q, b.attn1.to_k, b.attn1.to_v),
                b.attn1.to_out[0],
                b.ff.net,
            )
            for i, b in enumerate(blocks)
        ]
        self.proj_out = dit.proj_out_2
        # What the timesteps fix: each block's AdaLN, the output's, and the action encoder's time branch.
        self.steps = [k * c.num_timestep_buckets // c.num_inference_timesteps for k in range(c.num_inference_timesteps)]
        ids = torch.tensor(list(embodiment_ids), device=self.device)
        encoder, decoder, states = head.action_encoder, head.action_decoder, head.state_encoder
        width = encoder.W1.W.shape[-1]
        self.ada: list[list[tuple[Tensor, Tensor]]] = []
        times = []
        for step in self.steps:
            time_embedding = dit.timestep_encoder.timestep_embedder(step)
            rows = []
            for block in blocks:
                scale, shift = block.norm1.linear(F.silu(time_embedding)).flatten().chunk(2)
                rows.append((scale.contiguous(), shift.contiguous()))
            shift, scale = dit.proj_out_1(F.silu(time_embedding)).flatten().chunk(2)
            rows.append((scale.contiguous(), shift.contiguous()))
            self.ada.append(rows)
            wave = encoder.wave(step, width)
            times.append(wave.float() @ encoder.W2.W[ids, width:].float() + encoder.W2.b[ids].float())
        self.sets = WeightSets(
            {
                "state1": states.layer1.W[ids], "state1_bias": states.layer1.b[ids, None],
                "state2": states.layer2.W[ids], "state2_bias": states.layer2.b[ids, None],
                "action1": encoder.W1.W[ids], "action1_bias": encoder.W1.b[ids, None],
                "action2": encoder.W2.W[ids, :width], "time_bias": torch.stack(times, dim=1).to(self.dtype),
                "action3": encoder.W3.W[ids], "action3_bias": encoder.W3.b[ids, None],
                "decode1": decoder.layer1.W[ids], "decode1_bias": decoder.layer1.b[ids, None],
                "decode2": decoder.layer2.W[ids], "decode2_bias": decoder.layer2.b[ids, None],
            }
        )  # fmt: skip
        self.position = head.position_embedding.weight[: c.action_horizon].contiguous()
        self.beside = self.urgent = None
        if self.device.type == "cuda":
            self.beside = torch.cuda.Stream(self.device)
            self.urgent = torch.cuda.Stream(self.device, priority=-1)

    def frames(self, rows: int, grids: Grids) -> Tensor:
        """Room for what `encode_images` takes: uint8 (rows, values), black."""
        values = sum(frame_values(grids, self.config.vision))
        return torch.zeros(rows, values, dtype=torch.uint8, device=self.device)

    # ---------------------------------------------------------------------------------------------------- constants

    @torch.inference_mode()
    def tables(self, grids: Grids) -> Tables:
        """The vision tower's constants for images with these grids."""
        c = self.config
        tables = {}
        for grid in dict.fromkeys(grids):
            cos, sin = vision_rotary(grid, c.vision, self.device)
            half = cos.shape[-1] // 2
            position = self.vision.position(grid) + self.vision.patch_embed.proj.bias
            tables[grid] = (position.to(self.dtype), cos[:, :half].contiguous(), sin[:, :half].contiguous())
        return tables

    def plan(self, grids: Grids, tokens: int) -> Plan:
        """The constants of rows with these image grids, in a rung of so many tokens."""
        c = self.config
        image, at = [], self.lead
        for h, w in grids:
            count = h * w // c.vision.spatial_merge_size**2
            image += list(range(at, at + count))
            at += count + 2  # <|vision_end|> and the next image's <|vision_start|>
        text = sorted(set(range(tokens)) - set(image))
        return Plan(torch.tensor(image, device=self.device), torch.tensor(text, device=self.device))

    # ------------------------------------------------------------------------------------------------------ forward

    @torch.inference_mode()
    def encode_images(self, frames: Tensor, grids: Grids, tables: Tables) -> list[Tensor]:
        """The images of R rows: uint8 (R, values), a row's images (h, w, 3) one after the other
        -> [tokens, *DeepStack taps], each (R, image tokens of a row, width)."""
        rows, vision = frames.shape[0], self.config.vision
        pieces = frames.split(frame_values(grids, vision), dim=1)
        done: dict[int, list[Tensor]] = {}
        for grid, constants in tables.items():
            at = [j for j, g in enumerate(grids) if g == grid]
            joined = frames if len(at) == len(pieces) else torch.cat([pieces[j] for j in at], dim=1)
            images = joined.view(-1, grid[0] * vision.patch_size, grid[1] * vision.patch_size, vision.in_channels)
            pixels = cut_patches(images, vision, self.dtype).flatten(0, 1)
            outputs = [t.view(rows, len(at), -1, t.shape[-1]) for t in self._see(pixels, *constants)]
            if len(at) == len(pieces):
                return [t.flatten(1, 2) for t in outputs]
            for n, j in enumerate(at):
                done[j] = [t[:, n] for t in outputs]
        return [torch.cat([done[j][k] for j in range(len(pieces))], dim=1) for k in range(len(done[0]))]

    @torch.inference_mode()
    def begin(self, x: Inputs, plan: Plan) -> Start:
        """What needs no image."""
        c = self.config
        cos, sin = (t.flatten(0, 2)[:, : c.text.head_dim // 2].contiguous() for t in text_rotary(x.positions, c.text))
        w = self.sets.of(x.embodiment)
        state = F.relu(torch.baddbmm(w["state1_bias"], x.state[:, None].to(self.dtype), w["state1"]))
        state = torch.baddbmm(w["state2_bias"], state, w["state2"])
        w["action3_bias"] = w["action3_bias"] + self.position
        return Start(
            embedded=F.embedding(x.input_ids, self.embed),
            cos=cos,
            sin=sin,
            weights=w,
            state=state,
            own=torch.full_like(x.counts, 1 + c.action_horizon),
            image_counts=torch.full_like(x.counts, len(plan.image_index)),
            trajectory=self._trajectory(w, state, x.noise, 0),
            speed=(x.velocity_scale / len(self.steps)).to(self.dtype),
        )

    @torch.inference_mode()
    def act(
        self,
        x: Inputs,
        start: Start,
        vision_tokens: list[Tensor],
        plan: Plan,
        turn_ends: torch.cuda.Event | None = None,
    ) -> Tensor:
        """R action chunks, normalised: (R, H, A) in the model's dtype. vision_tokens: what `encode_images` returned.
        turn_ends: recorded before step TURN_ENDS. Uses `start` up."""
        context = self._context(x, start, vision_tokens, plan)
        if self.urgent is None:
            return self._denoise(x, start, context, plan, turn_ends)
        # The steps' kernels are small. Where another process computes beside them (under MPS), its large ones would
        # keep each of them waiting; so they go first, and the other has the whole GPU so much sooner.
        main = torch.cuda.current_stream()
        self.urgent.wait_stream(main)
        with torch.cuda.stream(self.urgent):
            chunks = self._denoise(x, start, context, plan, turn_ends)
        main.wait_stream(self.urgent)
        return chunks

    def _see(self, pixels: Tensor, position: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """The vision tower over images of one grid: pixels (N, values) -> [tokens, *taps], (N / 4, width) each."""
        v, c = self.vision, self.config.vision
        patches = position.shape[0]
        images = len(pixels) // patches
        counts = torch.full((images,), patches, dtype=torch.int32, device=pixels.device)
        x = F.linear(pixels, v.patch_embed.proj.weight.flatten(1))
        blocks = list(v.blocks)
        norm = blocks[0].norm1
        y = add_norm(x, position, "layer", norm.weight, norm.bias, norm.eps)
        taps = []
        for i, block in enumerate(blocks):
            qkv = F.linear(y, block.attn.qkv.weight, block.attn.qkv.bias)
            rope_(qkv, cos, sin, c.num_heads, c.num_heads)
            q, k, value = qkv.view(-1, patches, 3, c.num_heads, c.hidden_size // c.num_heads).unbind(2)
            if images <= OWN_ATTENTION_IMAGES:
                attended = attend(q, k, value, counts).flatten(0, 1)
            else:
                q, k, value = (t.transpose(1, 2) for t in (q, k, value))
                attended = F.scaled_dot_product_attention(q, k, value).transpose(1, 2).reshape(x.shape)
            norm = block.norm2
            r = F.linear(attended, block.attn.proj.weight, block.attn.proj.bias)
            y = add_norm(x, r, "layer", norm.weight, norm.bias, norm.eps)
            r = gelu_linear(y, block.mlp.linear_fc1.weight, block.mlp.linear_fc1.bias)
            r = F.linear(r, block.mlp.linear_fc2.weight, block.mlp.linear_fc2.bias)
            norm = blocks[i + 1].norm1 if i + 1 < len(blocks) else v.merger.norm
            y = add_norm(x, r, "layer", norm.weight, norm.bias, norm.eps)
            if i in c.deepstack_visual_indexes:
                merger = v.deepstack_merger_list[c.deepstack_visual_indexes.index(i)]
                joined = x.view(-1, merger.joined)
                taps.append(self._merge(add_norm(joined, None, "layer", merger.norm.weight, merger.norm.bias,
                                                 merger.norm.eps), merger))  # fmt: skip
        return [self._merge(y.view(-1, v.merger.joined), v.merger), *taps]

    @staticmethod
    def _merge(x: Tensor, merger: Any) -> Tensor:
        return merger.linear_fc2(F.gelu(merger.linear_fc1(x)))

    def _context(self, x: Inputs, start: Start, vision_tokens: list[Tensor], plan: Plan) -> Tensor:
        """Vision-language tokens as the action head sees them: (R * L, width)."""
        c = self.config
        tokens, *taps = vision_tokens
        rows, length = x.input_ids.shape
        start.embedded.index_copy_(1, plan.image_index, tokens)
        h = start.embedded.flatten(0, 1)
        heads, kv_heads, dim = c.text.num_attention_heads, c.text.num_key_value_heads, c.text.head_dim
        for i, (norm1, qkv_weight, norms, out, norm2, gate_up, down) in enumerate(self.text):
            if 0 < i <= len(taps):
                h.view(rows, length, -1).index_add_(1, plan.image_index, taps[i - 1])
            qkv = F.linear(add_norm(h, None, "rms", norm1.weight, None, norm1.eps), qkv_weight)
            rope_(qkv, start.cos, start.sin, heads, kv_heads, norms)
            q, k, v = (
                t.unflatten(1, (-1, dim)).unflatten(0, (rows, length)).transpose(1, 2)
                for t in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
            )
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            h.addmm_(attended.transpose(1, 2).reshape(rows * length, -1), out.t())  # no bias: the product adds to h
            y = add_norm(h, None, "rms", norm2.weight, None, norm2.eps)
            h.addmm_(silu_mul(F.linear(y, gate_up)), down.t())
        h = add_norm(h, None, "layer", self.vlln.weight, self.vlln.bias, self.vlln.eps)
        summed: Tensor | Sums | None = None
        vl_heads = c.vl_self_attention.num_attention_heads
        for norm1, (weight, bias), to_out, norm3, ff in self.vl:
            qkv = F.linear(add_norm(h, summed, "layer", norm1.weight, norm1.bias, norm1.eps), weight, bias)
            q, k, v = qkv.view(rows, length, 3, vl_heads, -1).unbind(2)
            summed = F.linear(attend(q, k, v, x.counts).flatten(0, 1), to_out.weight, to_out.bias)
            y = add_norm(h, summed, "layer", norm3.weight, norm3.bias, norm3.eps)
            summed = self._feed_forward(y, ff)
        add_norm(h, summed, "layer")  # for its sum
        return h

    @staticmethod
    def _feed_forward(y: Tensor, ff: Any) -> Tensor | Sums:
        first, last = ff[0].proj, ff[2]
        inner = gelu_linear(y, first.weight, first.bias)
        return linear_split(inner, last.weight, last.bias, splits_of(FEED_FORWARD_SPLITS, inner))

    def _trajectory(self, w: dict[str, Tensor], state: Tensor, actions: Tensor, step: int) -> Tensor:
        """The DiT's input at a step: (R, 1 + H, width), the state token and those of noisy actions (R, H, A)."""
        encoded = torch.baddbmm(w["action1_bias"], actions, w["action1"])
        encoded = F.silu(torch.baddbmm(w["time_bias"][:, step, None], encoded, w["action2"]))
        return torch.cat((state, torch.baddbmm(w["action3_bias"], encoded, w["action3"])), dim=1)

    def _denoise(
        self, x: Inputs, start: Start, context: Tensor, plan: Plan, turn_ends: torch.cuda.Event | None
    ) -> Tensor:
        """Four Euler steps from noise."""
        c, w = self.config, start.weights
        rows, length = x.input_ids.shape
        heads = c.dit.num_attention_heads
        context = context.view(rows, length, -1)
        kv: dict[int, tuple[Tensor, Tensor]] = {}

        def project(layers: list[int], index: Tensor, fused: tuple[Tensor, Tensor | None]) -> None:
            """Keys and values of these layers' cross-attention, from the tokens at `index`."""
            joined = F.linear(context.index_select(1, index), *fused)
            parts = joined.view(rows, len(index), len(layers), 2, heads, -1).unbind(2)
            kv.update({layer: (part[:, :, 0], part[:, :, 1]) for layer, part in zip(layers, parts, strict=True)})

        project(self.text_layers, plan.text_index, self.text_kv)
        if self.beside is None:
            project(self.image_layers, plan.image_index, self.image_kv)
        else:  # the first layers, which leave much of the GPU idle, do not need these yet
            main = torch.cuda.current_stream()
            self.beside.wait_stream(main)
            with torch.cuda.stream(self.beside):
                project(self.image_layers, plan.image_index, self.image_kv)
        actions = x.noise
        for step in range(len(self.steps)):
            if step == TURN_ENDS and turn_ends is not None:
                turn_ends.record()
            trajectory = self._trajectory(w, start.state, actions, step) if step else start.trajectory
            h = trajectory.flatten(0, 1)
            r: Tensor | Sums | None = None
            for i, ((weight, bias), to_out, ff) in enumerate(self.dit):
                if self.beside is not None and step == 0 and i == self.image_layers[0]:
                    main.wait_stream(self.beside)
                y = add_norm(h, r, "ada", *self.ada[step][i])
                projected = F.linear(y, weight, bias)
                if i % 2:
                    q, k, v = projected.view(rows, -1, 3, heads, c.dit.attention_head_dim).unbind(2)
                else:
                    q, (k, v) = projected.view(rows, -1, heads, c.dit.attention_head_dim), kv[i]
                counts = start.own if i % 2 else x.text_counts if i in self.text_layers else start.image_counts
                attended = attend(q, k, v, counts).flatten(0, 1)
                r = linear_split(attended, to_out.weight, to_out.bias, splits_of(OUT_SPLITS, attended))
                r = self._feed_forward(add_norm(h, r, "layer"), ff)
            y = add_norm(h, r, "ada", *self.ada[step][-1], eps=1e-6)
            hidden = F.linear(y, self.proj_out.weight, self.proj_out.bias).view(rows, -1, self.proj_out.out_features)
            velocity = torch.baddbmm(w["decode1_bias"], hidden[:, 1:], w["decode1"])
            velocity = torch.baddbmm(w["decode2_bias"], F.relu(velocity), w["decode2"])
            actions = torch.addcmul(actions, velocity, start.speed)
        return actions


# ------------------------------------------------------------------------------------------------------------ graphs

ROW_RUNGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TEXT_RUNGS = (32, 64, 128, 256, 512)  # room for a row's tokens that are no image


def rung_of(count: int, rungs: Sequence[int]) -> int | None:
    """The smallest rung that holds `count`, or None beyond the last."""
    return next((rung for rung in rungs if rung >= count), None)


def image_tokens(grids: Grids, vision: VisionConfig) -> int:
    """Image tokens of a row with these grids."""
    return sum(height * width for height, width in grids) // vision.spatial_merge_size**2


def padded_length(grids: Grids, length: int, vision: VisionConfig) -> int:
    """The token rung of rows of at most `length` tokens; beyond the last, their own length."""
    images = image_tokens(grids, vision)
    rung = rung_of(length - images, TEXT_RUNGS)
    return length if rung is None else images + rung


@dataclass(frozen=True)
class HostRow:
    """One row on the host: what `Inputs` joins.

    frames, sizes, prepared, seed, prefix (overlap, A) or None, velocity_scale (H,) or None: see `policy.Row`;
    input_ids: int64 (L,); positions: int64 (3, L); state: float32; embodiment: the index into the engine's weight sets.
    """

    frames: Tensor
    sizes: tuple[tuple[int, int], ...]
    prepared: bool
    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    state: NDArray[np.float32]
    embodiment: int
    seed: int
    prefix: NDArray[np.float32] | None
    velocity_scale: Tensor | None


class Buffers:
    """A rung's inputs, packed: one pinned host block, one device block, and views of both, so one copy moves all."""

    def __init__(self, fused: Fused, rows: int, tokens: int) -> None:
        c = fused.config
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "input_ids": ((rows, tokens), torch.int64),
            "positions": ((3, rows, tokens), torch.int64),
            "text_counts": ((rows,), torch.int32),
            "counts": ((rows,), torch.int32),
            "state": ((rows, c.state_history_length * c.max_state_dim), torch.float32),
            "embodiment": ((rows,), torch.int64),
            "velocity_scale": ((rows, c.action_horizon, 1), torch.float32),
        }
        sizes = {name: -(-math.prod(shape) * dtype.itemsize // 256) * 256 for name, (shape, dtype) in fields.items()}
        cuda = fused.device.type == "cuda"
        self.host = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=cuda)
        self.block = torch.zeros_like(self.host, device=fused.device)
        views, at = [], 0
        for block in (self.host, self.block):
            named, at = {}, 0
            for name, (shape, dtype) in fields.items():
                piece = block[at : at + math.prod(shape) * dtype.itemsize]
                named[name] = piece.view(dtype).view(shape)
                at += sizes[name]
            views.append(named)
        self.on_host = {name: view.numpy() for name, view in views[0].items()}
        noise = torch.zeros(rows, c.action_horizon, c.max_action_dim, dtype=fused.dtype, device=fused.device)
        self.inputs = Inputs(noise=noise, **views[1])
        # Rows that a wave does not fill compute whatever the last wave left; here, before the first, one token.
        for name in ("text_counts", "counts"):
            self.on_host[name][:] = 1
        self.on_host["velocity_scale"][:] = 1
        self.block.copy_(self.host)

    def load(self, rows: Sequence[HostRow], images: int, generator: torch.Generator) -> None:
        """Puts `rows` into the first places, and starts their way to the device."""
        host, noise = self.on_host, self.inputs.noise
        for b, row in enumerate(rows):
            length = len(row.input_ids)
            host["input_ids"][b, :length] = row.input_ids
            host["positions"][:, b, :length] = row.positions
            host["counts"][b], host["text_counts"][b] = length, length - images
            host["state"][b] = row.state
            host["embodiment"][b] = row.embodiment
            host["velocity_scale"][b, :, 0] = 1.0 if row.velocity_scale is None else row.velocity_scale
        self.block.copy_(self.host, non_blocking=True)
        for b, row in enumerate(rows):
            # Each row alone, as the reference draws a single row: (1, H, A) on the device, in the compute dtype.
            generator.manual_seed(row.seed)
            torch.randn((1, *noise.shape[1:]), generator=generator, out=noise[b : b + 1])
            if row.prefix is not None:
                noise[b, : len(row.prefix)] = torch.from_numpy(row.prefix).to(noise.device, noise.dtype)


@dataclass
class VisionGraph:
    """The captured vision tower for so many rows of some grids: what its graph reads, and where its answer appears."""

    frames: Tensor
    tables: Tables
    graph: torch.cuda.CUDAGraph
    vision_tokens: list[Tensor]


@dataclass
class Rung:
    """The captured rest of a forward: its inputs and constants, whose memory the graphs read, and its answer."""

    vision: VisionGraph
    buffers: Buffers
    plan: Plan
    begin: torch.cuda.CUDAGraph
    graph: torch.cuda.CUDAGraph
    answer: Tensor  # float32 (R, H, A), pinned on the host
    turn_ends: torch.cuda.Event

    def replay(self) -> None:
        """The whole forward, on what the buffers hold."""
        self.vision.graph.replay()
        self.begin.replay()
        self.graph.replay()


class Engine:
    """Runs rows of one set of grids, from graphs where a rung holds them. Its buffers are for one thread.

    Args:
        fused: the network.
        resize: fills a tensor with images from rows' frames, their sizes and whether they are prepared, see
            `resize.Resizer`.
        max_rows: the largest row rung.
        row_rungs: by default ROW_RUNGS up to max_rows.
        spare_graphs: rungs to keep beside the ladders of `warm_up`; the least recently used goes first.
        turn: held while the GPU computes, see `handler.turn`.
    """

    def __init__(
        self,
        fused: Fused,
        resize: Resize,
        max_rows: int,
        row_rungs: list[int] | None = None,
        spare_graphs: int = 64,
        turn: AbstractContextManager[None] | None = None,
    ) -> None:
        self.fused, self.resize, self.max_graphs = fused, resize, spare_graphs
        self.turn = turn or nullcontext()
        cuda = fused.device.type == "cuda"
        self.row_rungs = row_rungs or sorted({rung for rung in ROW_RUNGS if rung < max_rows} | {max_rows})
        self.rungs: OrderedDict[Key, Rung] = OrderedDict()
        self.captures = 0  # of rungs
        self.generator = torch.Generator(fused.device)
        # As long as a rung has it.
        self._visions: WeakValueDictionary[tuple[Grids, int], VisionGraph] = WeakValueDictionary()
        self._met: set[Key] = set()  # shapes that came once without a graph
        # Graphs of a pool share memory, so they never run side by side; what begins runs beside the vision tower.
        pools: list[Any] = [torch.cuda.graph_pool_handle() if cuda else None for _ in range(2)]
        self._pool, self._begin_pool = pools
        self._stream = torch.cuda.Stream(fused.device) if cuda else None

    def images(self, grids: Grids) -> int:
        """See `image_tokens`."""
        return image_tokens(grids, self.fused.config.vision)

    def tokens(self, grids: Grids, length: int) -> int:
        """See `padded_length`."""
        return padded_length(grids, length, self.fused.config.vision)

    def rows(self, count: int) -> int:
        """The row rung of so many rows; beyond the last, themselves."""
        return rung_of(count, self.row_rungs) or count

    def warm_up(self, grids: Grids) -> None:
        """Captures the whole ladder for rows with these grids."""
        start = time.perf_counter()
        for text in reversed(TEXT_RUNGS):  # the largest first, so that the others fit into its memory
            for rows in reversed(self.row_rungs):
                key = (grids, rows, self.images(grids) + text)
                self.max_graphs += key not in self.rungs
                self._capture(key)
            logger.info("captured %d tokens, up to %d rows, after %.1f s", self.images(grids) + text,
                        self.row_rungs[-1], time.perf_counter() - start)  # fmt: skip

    @torch.inference_mode()
    def __call__(
        self, rows: Sequence[HostRow], grids: Grids, fixed_rows: int | None = None
    ) -> NDArray[np.float32]:
        """The rows' chunks, normalised: (n, H, A) float32 on the host. fixed_rows: the row rung to use."""
        tokens = self.tokens(grids, max(len(row.input_ids) for row in rows))
        wanted = fixed_rows or self.rows(len(rows))
        key = (grids, wanted, tokens)
        if key not in self.rungs and key in self._met and self._stream is not None:
            # The second wave of a shape waits for its capture, once; the first ran at once.
            self._met.discard(key)
            if tokens - self.images(grids) in TEXT_RUNGS and wanted in self.row_rungs:
                self._capture(key)
        if key not in self.rungs:
            if len(self._met) < 1024:
                self._met.add(key)
            with self.turn:
                return self._run(rows, grids, wanted, tokens)
        rung = self.rungs[key]
        self.rungs.move_to_end(key)
        with self.turn:
            self._resize(rows, rung.vision.frames)
            rung.vision.graph.replay()
            with torch.cuda.stream(self._stream):  # while the vision tower runs
                rung.buffers.load(rows, self.images(grids), self.generator)
                rung.begin.replay()
            torch.cuda.current_stream().wait_stream(self._stream)  # type: ignore[arg-type]
            rung.graph.replay()
            rung.turn_ends.synchronize()
        torch.cuda.current_stream().synchronize()
        return rung.answer.numpy()[: len(rows)].copy()

    def _run(self, rows: Sequence[HostRow], grids: Grids, wanted: int, tokens: int) -> NDArray[np.float32]:
        """One forward without graphs."""
        fused = self.fused
        frames = fused.frames(wanted, grids)
        self._resize(rows, frames)
        buffers = Buffers(fused, wanted, tokens)
        buffers.load(rows, self.images(grids), self.generator)
        plan = fused.plan(grids, tokens)
        vision_tokens = fused.encode_images(frames, grids, fused.tables(grids))
        chunks = fused.act(buffers.inputs, fused.begin(buffers.inputs, plan), vision_tokens, plan)
        return chunks.float().cpu().numpy()[: len(rows)]

    def _resize(self, rows: Sequence[HostRow], frames: Tensor) -> None:
        self.resize([row.frames for row in rows], [row.sizes for row in rows], [row.prepared for row in rows], frames)

    def _graph(self, run: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
        """`run` captured, and what it returned, whose memory every replay fills anew.

        cuBLAS takes its workspace anew within each capture, from the graph's pool, where it stays: PyTorch keeps one
        for a stream, which graphs that run side by side must not share, and which it frees with any of its graphs.
        """
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # once outside the graph: Triton compiles
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize(self.fused.device)
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: others may upload frames meanwhile.
        capture = torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local")
        with torch.inference_mode(), capture:
            result = run()
        torch._C._cuda_clearCublasWorkspaces()
        return graph, result

    def _capture(self, key: Key) -> None:
        if self._stream is None or key in self.rungs:
            return
        grids, rows, tokens = key
        fused = self.fused
        vision = self._visions.get((grids, rows))
        if vision is None:
            frames, tables = fused.frames(rows, grids), fused.tables(grids)
            see = self._graph(lambda: fused.encode_images(frames, grids, tables), self._pool)
            vision = VisionGraph(frames, tables, *see)
            self._visions[grids, rows] = vision
        plan, buffers, vision_tokens = fused.plan(grids, tokens), Buffers(fused, rows, tokens), vision.vision_tokens
        begin, start = self._graph(lambda: fused.begin(buffers.inputs, plan), self._begin_pool)
        begin.replay()  # capturing computed nothing, and the next line runs on it
        # `start` is not kept: the rungs' may share memory, for each is used up before another begins.
        answer = torch.empty(buffers.inputs.noise.shape, dtype=torch.float32, pin_memory=True)
        turn_ends = torch.cuda.Event(external=True)  # a node of the graph, for the host to wait for

        def act() -> None:
            chunks = fused.act(buffers.inputs, start, vision_tokens, plan, turn_ends)
            answer.copy_(chunks.float(), non_blocking=True)

        graph, _ = self._graph(act, self._pool)
        self.rungs[key] = Rung(vision, buffers, plan, begin, graph, answer, turn_ends)
        self.captures += 1
        while len(self.rungs) > self.max_graphs:
            self.rungs.popitem(last=False)
