"""GR00T N1.7 inference in one file: Qwen3-VL backbone, vl_self_attention, flow-matching action head.

Read bottom up: `Gr00t.forward` -> `Backbone` (vision, then language) -> `ActionHead` (four Euler steps over the DiT).
Attribute names are the published tensor names (`backbone.model.model.visual.blocks.0.attn.qkv.weight`, ...), so a
checkpoint loads without renaming.

Rows of one batch may differ in prompt length, image grids and embodiment. Padding stands on the right and never
reaches a row's result: the language model is causal, so nothing before the padding sees it, and every other attention
over vision-language tokens is masked. A row's result in a batch is its result alone, up to rounding.

Shapes: B rows, L tokens (the longest row), P patches of all images together, H action steps, A action width.
Architecture: NVIDIA Isaac-GR00T `gr00t/model/gr00t_n1d7`; Qwen3-VL as in Hugging Face transformers `qwen3_vl`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Grid = tuple[int, int]  # an image's patches, (rows, columns), before the 2x2 merge


# ---------------------------------------------------------------------------------------------------- configuration


@dataclass(frozen=True)
class VisionConfig:
    """Qwen3-VL vision tower; defaults are Cosmos-Reason2-2B."""

    depth: int = 24
    hidden_size: int = 1024
    num_heads: int = 16
    intermediate_size: int = 4096
    out_hidden_size: int = 2048
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (5, 11, 17)
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2


@dataclass(frozen=True)
class TextConfig:
    """Qwen3-VL language model; defaults are Cosmos-Reason2-2B."""

    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6
    mrope_section: tuple[int, ...] = (24, 20, 20)


@dataclass(frozen=True)
class TransformerConfig:
    """One of the action head's transformers (`diffusion_model_cfg`, `vl_self_attention_cfg`)."""

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    output_dim: int = 0  # DiT only

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class Gr00tConfig:
    """What `config.json` says; defaults are the published GR00T-N1.7-3B."""

    vision: VisionConfig
    text: TextConfig
    dit: TransformerConfig
    vl_self_attention: TransformerConfig
    image_token_id: int = 151655
    select_layer: int = 16
    backbone_embedding_dim: int = 2048
    max_state_dim: int = 132
    max_action_dim: int = 132
    action_horizon: int = 40
    hidden_size: int = 1024
    input_embedding_dim: int = 1536
    max_num_embodiments: int = 32
    max_seq_len: int = 1024
    state_history_length: int = 1
    num_inference_timesteps: int = 4
    num_timestep_buckets: int = 1000
    attend_text_every_n_blocks: int = 2

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Gr00tConfig:
        """Reads a checkpoint's `config.json`.

        The published file names its backbone (`model_name`) without describing it; Cosmos-Reason2-2B is then assumed.
        A checkpoint with another backbone carries `backbone_config`, in the form of a Qwen3-VL `config.json`.

        Raises:
            ValueError: the file describes a variant that this code does not compute.
        """
        # Variants of the training code that would change the forward; serving one as if it were the default would
        # move a robot by wrong numbers, so they are refused.
        required = {"use_alternate_vl_dit": True, "use_vlln": True, "add_pos_embed": True}
        for key, value in required.items():
            if config.get(key, value) != value:
                raise ValueError(f"config.json: {key} is {config[key]!r}; only {value!r} is supported")
        if config.get("model_type", "Gr00tN1d7") != "Gr00tN1d7":
            raise ValueError(f"config.json: model_type is {config['model_type']!r}; expected 'Gr00tN1d7'")
        if config.get("use_tactile"):
            raise ValueError("config.json: use_tactile is set; tactile checkpoints are not supported")
        dit = dict(config.get("diffusion_model_cfg") or {})
        if dit.get("positional_embeddings") or not dit.get("interleave_self_attention", True):
            raise ValueError("config.json: diffusion_model_cfg must interleave self-attention, without positions")
        if dit.get("norm_type", "ada_norm") != "ada_norm":
            raise ValueError(f"config.json: diffusion_model_cfg.norm_type is {dit['norm_type']!r}; expected 'ada_norm'")

        backbone = dict(config.get("backbone_config") or {})
        text = dict(backbone.get("text_config") or {})
        rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
        text = {**text, **{k: rope[k] for k in ("mrope_section", "rope_theta") if k in rope}}
        top = {f.name for f in fields(cls)} - {"vision", "text", "dit", "vl_self_attention", "image_token_id"}
        return cls(
            vision=_pick(VisionConfig, backbone.get("vision_config") or {}),
            text=_pick(TextConfig, text),
            dit=_pick(
                TransformerConfig,
                {"num_layers": 32, "num_attention_heads": 32, "attention_head_dim": 48, "output_dim": 1024, **dit},
            ),
            vl_self_attention=_pick(
                TransformerConfig,
                {
                    "num_layers": 4,
                    "num_attention_heads": 32,
                    "attention_head_dim": 64,
                    **(config.get("vl_self_attention_cfg") or {}),
                },
            ),
            image_token_id=int(backbone.get("image_token_id", cls.image_token_id)),
            **{k: v for k, v in config.items() if k in top},
        )


def _pick(kind: type[Any], values: dict[str, Any]) -> Any:
    """A config dataclass from the keys of `values` that it has."""
    names = {f.name for f in fields(kind)}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names})


# ------------------------------------------------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class Batch:
    """One forward's input, on the model's device.

    Attributes:
        input_ids: (B, L) int64, right-padded with any valid id.
        positions: (3, B, L) int64, see `mrope_positions`.
        lengths: the rows' token counts, B of them, on the host.
        grids: per row, its images' patch grids, in the order of the image tokens.
        pixels: (P, channels * temporal_patch * patch * patch) in the model's dtype: all rows' patches, row after row.
        state: (B, state_history_length * max_state_dim) in the model's dtype.
        embodiment_id: (B,) int64, which weight set of the per-embodiment layers each row uses.
        noise: (B, H, A) in the model's dtype: where each row's trajectory starts.
        velocity_scale: (B, H, 1) in the model's dtype: 1, or less where real-time chunking holds a step.
    """

    input_ids: Tensor
    positions: Tensor
    lengths: Sequence[int]
    grids: Sequence[Sequence[Grid]]
    pixels: Tensor
    state: Tensor
    embodiment_id: Tensor
    noise: Tensor
    velocity_scale: Tensor


def cut_patches(frames: Tensor, c: VisionConfig, dtype: torch.dtype) -> Tensor:
    """uint8 frames (N, h, w, 3) -> (N, patches, 3 * t * p * p) in [-1, 1], merge block by merge block.

    A still image fills the whole temporal patch.
    """
    n, height, width, channels = frames.shape
    p, m = c.patch_size, c.spatial_merge_size
    blocks = frames.view(n, height // p // m, m, p, width // p // m, m, p, channels).permute(0, 1, 4, 2, 5, 7, 3, 6)
    scaled = ((blocks.float() - 127.5) / 127.5).to(dtype)[:, :, :, :, :, :, None]
    return scaled.expand(-1, -1, -1, -1, -1, -1, c.temporal_patch_size, -1, -1).reshape(n, height * width // p**2, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Scaled dot-product attention, q (B, heads, N, D), k and v (B, heads or fewer, M, D) -> (B, N, heads * D).

    mask: bool, broadcastable to (B, heads, N, M), True where a query may look.
    """
    grouped = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, heads * D) -> (B, heads, N, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split layout; cos and sin broadcast against x."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


# ------------------------------------------------------------------------------------------------------------ vision


class VisionAttention(nn.Module):
    def __init__(self, c: VisionConfig) -> None:
        super().__init__()
        self.num_heads = c.num_heads
        self.qkv = nn.Linear(c.hidden_size, 3 * c.hidden_size)
        self.proj = nn.Linear(c.hidden_size, c.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(x).chunk(3, dim=-1))
        # The reference rotates in float32 and rounds back.
        q, k = (rotate(t.float(), cos, sin).to(x.dtype) for t in (q, k))
        return self.proj(attention(q, k, v))


class VisionMLP(nn.Module):
    def __init__(self, c: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(c.hidden_size, c.intermediate_size)
        self.linear_fc2 = nn.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, c: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(c.hidden_size, eps=1e-6)
        self.attn = VisionAttention(c)
        self.mlp = VisionMLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """2x2 patches -> one token of the language model's width; DeepStack's mergers normalise after joining the four."""

    def __init__(self, c: VisionConfig, norm_after_join: bool) -> None:
        super().__init__()
        self.norm_after_join = norm_after_join
        joined = c.hidden_size * c.spatial_merge_size**2
        self.norm = nn.LayerNorm(joined if norm_after_join else c.hidden_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(joined, joined)
        self.linear_fc2 = nn.Linear(joined, c.out_hidden_size)
        self.joined = joined

    def forward(self, x: Tensor) -> Tensor:
        """(N, patches, hidden) -> (N, patches / 4, out_hidden)."""
        x = x if self.norm_after_join else self.norm(x)
        x = x.unflatten(1, (-1, self.joined // x.shape[-1])).flatten(2)
        x = self.norm(x) if self.norm_after_join else x
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    def __init__(self, c: VisionConfig) -> None:
        super().__init__()
        kernel = (c.temporal_patch_size, c.patch_size, c.patch_size)
        self.proj = nn.Conv3d(c.in_channels, c.hidden_size, kernel, stride=kernel)

    def forward(self, pixels: Tensor) -> Tensor:
        """A convolution whose stride is its kernel is a matrix product: (P, channels * t * p * p) -> (P, hidden)."""
        return F.linear(pixels, self.proj.weight.flatten(1), self.proj.bias)


class Vision(nn.Module):
    def __init__(self, c: VisionConfig) -> None:
        super().__init__()
        self.config = c
        self.patch_embed = PatchEmbed(c)
        self.pos_embed = nn.Embedding(c.num_position_embeddings, c.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(c) for _ in range(c.depth))
        self.merger = PatchMerger(c, norm_after_join=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(c, norm_after_join=True) for _ in c.deepstack_visual_indexes
        )

    def forward(self, pixels: Tensor, grid: Grid) -> tuple[Tensor, list[Tensor]]:
        """N images of one grid: (N * h * w, patch values) -> tokens and DeepStack taps, each (N, h * w / 4, out)."""
        c = self.config
        x = self.patch_embed(pixels).unflatten(0, (-1, grid[0] * grid[1]))
        x = x + self.position(grid).to(x.dtype)
        cos, sin = vision_rotary(grid, c, x.device)
        taps = []
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if i in c.deepstack_visual_indexes:
                taps.append(self.deepstack_merger_list[c.deepstack_visual_indexes.index(i)](x))
        return self.merger(x), taps

    def position(self, grid: Grid) -> Tensor:
        """Learned square position table, resampled bilinearly (corners aligned) to the grid -> (h * w, hidden)."""
        c, device = self.config, self.pos_embed.weight.device
        side = math.isqrt(c.num_position_embeddings)
        row, col = (t * (side - 1) / max(n - 1, 1) for t, n in zip(block_order(grid, c, device), grid, strict=True))
        top, left = row.long(), col.long()
        bottom, right = (top + 1).clamp_max(side - 1), (left + 1).clamp_max(side - 1)
        down, over = (row - top)[:, None], (col - left)[:, None]
        table = self.pos_embed.weight
        return (
            table[top * side + left] * ((1 - down) * (1 - over)).to(table.dtype)
            + table[top * side + right] * ((1 - down) * over).to(table.dtype)
            + table[bottom * side + left] * (down * (1 - over)).to(table.dtype)
            + table[bottom * side + right] * (down * over).to(table.dtype)
        )


def block_order(grid: Grid, c: VisionConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Each patch's row and column, float32 (h * w,), in the order the patches come: merge block by merge block."""
    (h, w), m = grid, c.spatial_merge_size
    rows = torch.arange(h, device=device, dtype=torch.float32)[:, None].expand(h, w)
    cols = torch.arange(w, device=device, dtype=torch.float32)[None, :].expand(h, w)
    row, col = (t.reshape(h // m, m, w // m, m).transpose(1, 2).flatten() for t in (rows, cols))
    return row, col


def vision_rotary(grid: Grid, c: VisionConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin (h * w, head_dim) float32: half the pairs turn with the row, half with the column (theta 1e4)."""
    half = c.hidden_size // c.num_heads // 2
    inv_freq = 1e4 ** (-torch.arange(0, half, 2, device=device, dtype=torch.float32) / half)
    row, col = block_order(grid, c, device)
    angle = torch.cat((row[:, None] * inv_freq, col[:, None] * inv_freq), dim=-1)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


# ---------------------------------------------------------------------------------------------------------- language


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class TextAttention(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.q_proj = nn.Linear(c.hidden_size, self.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.q_norm(split_heads(self.q_proj(x), self.heads)), cos, sin)
        k = rotate(self.k_norm(split_heads(self.k_proj(x), self.kv_heads)), cos, sin)
        v = split_heads(self.v_proj(x), self.kv_heads)
        return self.o_proj(attention(q, k, v, causal=True))


class TextMLP(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TextLayer(nn.Module):
    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.self_attn = TextAttention(c)
        self.mlp = TextMLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Language(nn.Module):
    def __init__(self, c: TextConfig, layers: int) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(TextLayer(c) for _ in range(layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # in the checkpoint, not on the path: see forward

    def forward(self, x: Tensor, positions: Tensor, image_mask: Tensor, taps: list[Tensor]) -> Tensor:
        """Causal layers over (B, L, width) embeddings.

        Returns the last kept layer's output BEFORE the final norm and before a DeepStack addition that would follow
        it: that is the feature the action head was trained on.

        taps: DeepStack features (image tokens of all rows, width), added after the first layers.
        """
        cos, sin = (t.to(x.dtype) for t in text_rotary(positions, self.config))
        for i, layer in enumerate(self.layers):
            if 0 < i <= len(taps):
                x = x.masked_scatter(image_mask[..., None], x[image_mask] + taps[i - 1])
            x = layer(x, cos, sin)
        return x


def text_rotary(positions: Tensor, c: TextConfig) -> tuple[Tensor, Tensor]:
    """cos and sin (B, 1, L, head_dim) float32 for positions (3, B, L): time, height, width, interleaved (M-RoPE)."""
    pairs = c.head_dim // 2
    inv_freq = c.rope_theta ** (
        -torch.arange(0, c.head_dim, 2, device=positions.device, dtype=torch.float32) / c.head_dim
    )
    angle = positions[..., None].float() * inv_freq  # (3, B, L, pairs)
    axis = torch.zeros(pairs, dtype=torch.long, device=positions.device)
    for which in (1, 2):
        axis[which : c.mrope_section[which] * 3 : 3] = which
    angle = angle.gather(0, axis.expand(1, *angle.shape[1:])).squeeze(0)
    angle = torch.cat((angle, angle), dim=-1)[:, None]
    return angle.cos(), angle.sin()


def mrope_positions(image: Tensor, grids: Sequence[Grid], merge: int) -> Tensor:
    """One row's (3, L) int64 positions: text counts up; an image spans its height and width from one time position.

    image: (L,) bool, which tokens are images; grids: theirs, in order; merge: patches per token along a side.
    """
    out = torch.zeros(3, len(image), dtype=torch.long)
    starts = torch.nonzero(image & ~torch.cat((image.new_zeros(1), image[:-1])))[:, 0].tolist()
    at = position = 0
    for start, (rows, columns) in zip(starts, grids, strict=True):
        h, w = rows // merge, columns // merge
        out[:, at:start] = position + torch.arange(start - at)
        position += start - at
        out[0, start : start + h * w] = position
        out[1, start : start + h * w] = position + torch.arange(h).repeat_interleave(w)
        out[2, start : start + h * w] = position + torch.arange(w).repeat(h)
        at, position = start + h * w, position + max(h, w)
    out[:, at:] = position + torch.arange(len(image) - at)
    return out


class Qwen3VL(nn.Module):
    def __init__(self, c: Gr00tConfig) -> None:
        super().__init__()
        self.visual = Vision(c.vision)
        self.language_model = Language(c.text, c.select_layer)


class BackboneModel(nn.Module):
    """Only here for its name: published tensors are called `backbone.model.model...`."""

    def __init__(self, c: Gr00tConfig) -> None:
        super().__init__()
        self.model = Qwen3VL(c)


class Backbone(nn.Module):
    def __init__(self, c: Gr00tConfig) -> None:
        super().__init__()
        self.config = c
        self.model = BackboneModel(c)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """-> features (B, L, width), which tokens are images, which are real (both bool, (B, L))."""
        c, qwen = self.config, self.model.model
        real = (
            torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
            < torch.tensor(batch.lengths, device=batch.input_ids.device)[:, None]
        )
        image = (batch.input_ids == c.image_token_id) & real
        tokens, taps = self.see(batch.pixels, [grid for row in batch.grids for grid in row])
        x = qwen.language_model.embed_tokens(batch.input_ids)
        x = x.masked_scatter(image[..., None], tokens)
        return qwen.language_model(x, batch.positions, image, taps), image, real

    def see(self, pixels: Tensor, grids: list[Grid]) -> tuple[Tensor, list[Tensor]]:
        """Runs the vision tower once per distinct grid and puts the images back in order: (image tokens, width)."""
        vision = self.model.model.visual
        pieces = pixels.split([h * w for h, w in grids])
        seen: list[tuple[Tensor, list[Tensor]] | None] = [None] * len(grids)
        for grid in dict.fromkeys(grids):
            at = [i for i, g in enumerate(grids) if g == grid]
            tokens, taps = vision(torch.cat([pieces[i] for i in at]), grid)
            for n, i in enumerate(at):
                seen[i] = (tokens[n], [tap[n] for tap in taps])
        done = [s for s in seen if s is not None]
        return torch.cat([s[0] for s in done]), [torch.cat(tap) for tap in zip(*(s[1] for s in done), strict=True)]


# ------------------------------------------------------------------------------------------------------- action head


class HeadAttention(nn.Module):
    """Attention with biases everywhere; keys and values come from `context` (cross) or from x (self)."""

    def __init__(self, c: TransformerConfig, context_width: int) -> None:
        super().__init__()
        self.heads = c.num_attention_heads
        self.to_q = nn.Linear(c.width, c.width)
        self.to_k = nn.Linear(context_width, c.width)
        self.to_v = nn.Linear(context_width, c.width)
        self.to_out = nn.ModuleList([nn.Linear(c.width, c.width)])

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q = split_heads(self.to_q(x), self.heads)
        k, v = split_heads(self.to_k(context), self.heads), split_heads(self.to_v(context), self.heads)
        return self.to_out[0](attention(q, k, v, mask))


class GeluProj(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class HeadFeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # Index 1 was dropout in training; it keeps the published names net.0 and net.2.
        self.net = nn.Sequential(GeluProj(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class VLBlock(nn.Module):
    """A block of vl_self_attention: plain pre-norm self-attention over vision-language tokens."""

    def __init__(self, c: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.width, eps=1e-5)
        self.attn1 = HeadAttention(c, c.width)
        self.norm3 = nn.LayerNorm(c.width, eps=1e-5)
        self.ff = HeadFeedForward(c.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x), mask=mask)
        return x + self.ff(self.norm3(x))


class VLSelfAttention(nn.Module):
    def __init__(self, c: TransformerConfig) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(VLBlock(c) for _ in range(c.num_layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            x = block(x, mask)
        return x


class AdaLayerNorm(nn.Module):
    """LayerNorm without weights, scaled and shifted by the timestep."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(time)).chunk(2, dim=-1)
        return F.layer_norm(x, x.shape[-1:], eps=1e-5) * (1 + scale) + shift


class DiTBlock(nn.Module):
    def __init__(self, c: TransformerConfig, context_width: int) -> None:
        super().__init__()
        self.norm1 = AdaLayerNorm(c.width)
        self.attn1 = HeadAttention(c, context_width)
        self.ff = HeadFeedForward(c.width)

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        x = x + self.attn1(self.norm1(x, time), context, mask)
        return x + self.ff(F.layer_norm(x, x.shape[-1:], eps=1e-5))


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(256, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, timestep: int) -> Tensor:
        """One timestep -> (1, 1, width); 256 sinusoids, cosines first, exponent over half - 1 (as in diffusers)."""
        weight = self.linear_1.weight
        freq = torch.exp(-math.log(1e4) * torch.arange(128, device=weight.device, dtype=torch.float32) / 127)
        angle = timestep * freq
        wave = torch.cat((angle.cos(), angle.sin())).to(weight.dtype)
        return self.linear_2(F.silu(self.linear_1(wave)))[None, None]


class TimestepEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(width)


class DiT(nn.Module):
    """Even layers look at vision-language tokens (text and image tokens in turn), odd layers at the trajectory."""

    def __init__(self, c: TransformerConfig, context_width: int, attend_text_every_n_blocks: int) -> None:
        super().__init__()
        self.text_period = 2 * attend_text_every_n_blocks
        self.timestep_encoder = TimestepEncoder(c.width)
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(c, context_width if i % 2 == 0 else c.width) for i in range(c.num_layers)
        )
        self.proj_out_1 = nn.Linear(c.width, 2 * c.width)
        self.proj_out_2 = nn.Linear(c.width, c.output_dim)

    def forward(self, x: Tensor, timestep: int, context: Tensor, text_mask: Tensor, image_mask: Tensor) -> Tensor:
        time = self.timestep_encoder.timestep_embedder(timestep)
        for i, block in enumerate(self.transformer_blocks):
            if i % 2:
                x = block(x, time, None, None)
            else:
                x = block(x, time, context, text_mask if i % self.text_period == 0 else image_mask)
        shift, scale = self.proj_out_1(F.silu(time)).chunk(2, dim=-1)
        x = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
        return self.proj_out_2(x)


class EmbodimentLinear(nn.Module):
    """One weight set per embodiment, chosen row by row."""

    def __init__(self, embodiments: int, width_in: int, width_out: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.zeros(embodiments, width_in, width_out))
        self.b = nn.Parameter(torch.zeros(embodiments, width_out))

    def forward(self, x: Tensor, embodiment_id: Tensor) -> Tensor:
        return torch.bmm(x, self.W[embodiment_id]) + self.b[embodiment_id][:, None]


class EmbodimentMLP(nn.Module):
    def __init__(self, embodiments: int, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, width_in, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, width_out)

    def forward(self, x: Tensor, embodiment_id: Tensor) -> Tensor:
        return self.layer2(F.relu(self.layer1(x, embodiment_id)), embodiment_id)


class ActionEncoder(nn.Module):
    def __init__(self, embodiments: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.W1 = EmbodimentLinear(embodiments, action_dim, width)
        self.W2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, actions: Tensor, timestep: int, embodiment_id: Tensor) -> Tensor:
        x = self.W1(actions, embodiment_id)
        wave = self.wave(timestep, x.shape[-1]).expand_as(x)
        return self.W3(F.silu(self.W2(torch.cat((x, wave), dim=-1), embodiment_id)), embodiment_id)

    def wave(self, timestep: int, width: int) -> Tensor:
        """The timestep as sines, then cosines: (width,)."""
        half = width // 2
        freq = torch.exp(-math.log(1e4) * torch.arange(half, device=self.W1.W.device, dtype=torch.float32) / half)
        return torch.cat(((timestep * freq).sin(), (timestep * freq).cos())).to(self.W1.W.dtype)


class ActionHead(nn.Module):
    def __init__(self, c: Gr00tConfig) -> None:
        super().__init__()
        self.config = c
        n, width = c.max_num_embodiments, c.input_embedding_dim
        self.vlln = nn.LayerNorm(c.backbone_embedding_dim)
        self.vl_self_attention = VLSelfAttention(c.vl_self_attention)
        self.state_encoder = EmbodimentMLP(n, c.max_state_dim * c.state_history_length, c.hidden_size, width)
        self.action_encoder = ActionEncoder(n, c.max_action_dim, width)
        self.action_decoder = EmbodimentMLP(n, c.hidden_size, c.hidden_size, c.max_action_dim)
        self.model = DiT(c.dit, c.backbone_embedding_dim, c.attend_text_every_n_blocks)
        self.position_embedding = nn.Embedding(c.max_seq_len, width)

    def forward(self, features: Tensor, image: Tensor, real: Tensor, batch: Batch) -> Tensor:
        """Euler integration of the flow from noise: (B, H, A) actions, normalised, in the model's dtype."""
        c, ids = self.config, batch.embodiment_id
        context = self.vl_self_attention(self.vlln(features), mask=real[:, None, None])
        text_mask, image_mask = (real & ~image)[:, None, None], image[:, None, None]
        state = self.state_encoder(batch.state[:, None], ids)
        position = self.position_embedding.weight[: c.action_horizon]
        actions = batch.noise
        for step in range(c.num_inference_timesteps):
            timestep = step * c.num_timestep_buckets // c.num_inference_timesteps
            trajectory = self.action_encoder(actions, timestep, ids) + position
            hidden = self.model(torch.cat((state, trajectory), dim=1), timestep, context, text_mask, image_mask)
            velocity = self.action_decoder(hidden, ids)[:, -c.action_horizon :]
            actions = actions + velocity / c.num_inference_timesteps * batch.velocity_scale
        return actions


class Gr00t(nn.Module):
    def __init__(self, config: Gr00tConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.action_head = ActionHead(config)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Predicts B action chunks: (B, action_horizon, max_action_dim), normalised, in the model's dtype."""
        features, image, real = self.backbone(batch)
        return self.action_head(features, image, real, batch)


def velocity_scale(horizon: int, frozen_steps: int, overlap_steps: int, ramp_rate: float) -> Tensor:
    """How fast each step of a chunk may still move under real-time chunking: (horizon,) float32 in [0, 1].

    0 over the frozen steps, then `1 - exp(-ramp_rate * t)` over the rest of the overlap (t from 0 to 1, ends left
    out, divided by its value at 1), then 1. As in Isaac-GR00T's `get_action_with_features`.
    """
    scale = torch.ones(horizon)
    scale[:frozen_steps] = 0.0
    ramp = 1 - torch.exp(-ramp_rate * torch.linspace(0.0, 1.0, overlap_steps - frozen_steps + 2))
    scale[frozen_steps:overlap_steps] = (ramp / ramp[-1].clamp_min(1e-8))[1:-1]
    return scale
