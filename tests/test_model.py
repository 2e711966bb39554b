"""The network against reference numbers: solo, and in any company."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from handler.gr00t.model import Batch, Gr00t, Gr00tConfig, mrope_positions, velocity_scale
from tests.conftest import REFERENCE

TINY = REFERENCE / "tiny"
needs_reference = pytest.mark.skipif(not TINY.is_dir(), reason="reference numbers are not in this checkout")
CASES = 6
IMAGE = 1000  # image_token_id of the reference
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def config() -> Gr00tConfig:
    raw = json.loads((TINY / "config.json").read_text())
    return Gr00tConfig.from_json({**raw["gr00t"], "backbone_config": raw["qwen3_vl"]})


@pytest.fixture(scope="module")
def model(config: Gr00tConfig) -> Gr00t:
    model = Gr00t(config).eval()
    model.load_state_dict(load_file(TINY / "weights.safetensors"), strict=True)
    return model


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Tensor]]:
    tensors = load_file(TINY / "cases.safetensors")
    return [
        {name.split(".", 1)[1]: t for name, t in tensors.items() if name.startswith(f"case{i}.")} for i in range(CASES)
    ]


def batch_of(cases: list[dict[str, Tensor]], horizon: int, padding: int = 0) -> Batch:
    """Joins solo cases; `padding` more columns than the longest row needs, filled with a real token's id."""
    ids = [case["input_ids"][0][case["attention_mask"][0].bool()] for case in cases]
    lengths = [len(row) for row in ids]
    joined = torch.full((len(cases), max(lengths) + padding), 7)
    for row, values in zip(joined, ids, strict=True):
        row[: len(values)] = values
    grids = [[(int(h), int(w)) for _, h, w in case["image_grid_thw"]] for case in cases]
    positions = torch.zeros(3, *joined.shape, dtype=torch.long)
    for b, (values, row_grids) in enumerate(zip(ids, grids, strict=True)):
        positions[:, b, : len(values)] = mrope_positions(values == IMAGE, row_grids, merge=2)
    return Batch(
        input_ids=joined,
        positions=positions,
        lengths=lengths,
        grids=grids,
        pixels=torch.cat([case["pixel_values"] for case in cases]),
        state=torch.cat([case["state"].flatten(1) for case in cases]),
        embodiment_id=torch.cat([case["embodiment_id"] for case in cases]).long(),
        noise=torch.cat([case["noise"] for case in cases]),
        velocity_scale=torch.ones(len(cases), horizon, 1),
    )


@needs_reference
@pytest.mark.parametrize("index", range(CASES))
def test_solo_equals_the_reference(
    index: int, model: Gr00t, cases: list[dict[str, Tensor]], config: Gr00tConfig
) -> None:
    case = cases[index]
    batch = batch_of([case], config.action_horizon)
    with torch.inference_mode():
        features, image, real = model.backbone(batch)
        head = model.action_head
        vl_embeds = head.vl_self_attention(head.vlln(features), mask=real[:, None, None])
    torch.testing.assert_close(features, case["backbone_features"], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(vl_embeds, case["vl_embeds"], rtol=0, atol=TOLERANCE)
    assert int(image.sum()) == sum(h * w // 4 for h, w in batch.grids[0])
    torch.testing.assert_close(model(batch), case["action_pred"], rtol=0, atol=TOLERANCE)


@needs_reference
@pytest.mark.parametrize("size", [2, 3, 6])
def test_every_company_leaves_a_row_its_solo_answer(
    size: int, model: Gr00t, cases: list[dict[str, Tensor]], config: Gr00tConfig
) -> None:
    for company in itertools.permutations(range(CASES), 2) if size == 2 else itertools.combinations(range(CASES), size):
        out = model(batch_of([cases[i] for i in company], config.action_horizon))
        for row, i in zip(out, company, strict=True):
            torch.testing.assert_close(row, cases[i]["action_pred"][0], rtol=0, atol=TOLERANCE)


@needs_reference
def test_padding_tokens_are_never_seen(model: Gr00t, cases: list[dict[str, Tensor]], config: Gr00tConfig) -> None:
    out = model(batch_of(cases, config.action_horizon, padding=9))
    for row, case in zip(out, cases, strict=True):
        torch.testing.assert_close(row, case["action_pred"][0], rtol=0, atol=TOLERANCE)


@needs_reference
def test_real_time_chunking_holds_for_its_own_row_only(
    model: Gr00t, cases: list[dict[str, Tensor]], config: Gr00tConfig
) -> None:
    rtc = json.loads((TINY / "config.json").read_text())["rtc"]
    overlap, horizon = rtc["rtc_overlap_steps"], rtc["action_horizon"]
    batch = batch_of([cases[0], cases[2], cases[5]], config.action_horizon)
    batch.noise[1, :overlap] = cases[2]["rtc_prefix"][0, horizon - overlap : horizon]
    batch.velocity_scale[1, :, 0] = velocity_scale(
        config.action_horizon, rtc["rtc_frozen_steps"], overlap, rtc["rtc_ramp_rate"]
    )
    out = model(batch)
    for row, want in zip(out, (cases[0]["action_pred"], cases[2]["rtc_action_pred"], cases[5]["action_pred"]),
                         strict=True):
        torch.testing.assert_close(row, want[0], rtol=0, atol=TOLERANCE)
    assert torch.equal(out[1, : rtc["rtc_frozen_steps"]], batch.noise[1, : rtc["rtc_frozen_steps"]])


def test_positions_of_text_and_images() -> None:
    # Three texts, an image of 2x3 tokens, one text, an image of 1x1, two texts.
    image = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0]).bool()
    assert mrope_positions(image, [(4, 6), (2, 2)], merge=2).tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 9],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert mrope_positions(torch.zeros(3).bool(), [], merge=2).tolist() == [[0, 1, 2]] * 3


def test_velocity_scale() -> None:
    scale = velocity_scale(8, frozen_steps=2, overlap_steps=5, ramp_rate=6.0)
    assert scale[:2].tolist() == [0, 0]
    assert scale[5:].tolist() == [1, 1, 1]
    # (1 - exp(-6 t)) / (1 - exp(-6)) at t = 1/4, 1/2, 3/4
    torch.testing.assert_close(scale[2:5], torch.tensor([0.778800, 0.952574, 0.991346]), rtol=0, atol=1e-5)
    assert velocity_scale(4, 0, 0, 6.0).tolist() == [1, 1, 1, 1]
    assert velocity_scale(4, 3, 3, 6.0).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_alternate_vl_dit": False}, "use_alternate_vl_dit"),
        ({"add_pos_embed": False}, "add_pos_embed"),
        ({"model_type": "Gr00tN1d6"}, "Gr00tN1d6"),
        ({"use_tactile": True}, "use_tactile"),
        ({"diffusion_model_cfg": {"positional_embeddings": "sinusoidal"}}, "without positions"),
        ({"diffusion_model_cfg": {"norm_type": "layer_norm"}}, "layer_norm"),
    ],
)
def test_a_variant_that_would_compute_something_else_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Gr00tConfig.from_json(change)


def test_the_published_config_needs_no_backbone_description() -> None:
    config = Gr00tConfig.from_json({"model_type": "Gr00tN1d7", "model_name": "nvidia/Cosmos-Reason2-2B"})
    with torch.device("meta"):
        shapes = {name: list(t.shape) for name, t in Gr00t(config).state_dict().items()}
    assert shapes["backbone.model.model.language_model.layers.15.mlp.gate_proj.weight"] == [6144, 2048]
    assert "backbone.model.model.language_model.layers.16.mlp.gate_proj.weight" not in shapes
    assert shapes["action_head.action_encoder.W2.W"] == [32, 3072, 1536]
    assert shapes["action_head.model.transformer_blocks.0.attn1.to_k.weight"] == [1536, 2048]
    assert shapes["action_head.model.transformer_blocks.1.attn1.to_k.weight"] == [1536, 1536]


@pytest.mark.skipif(not (REFERENCE.parent / "facts").is_dir(), reason="the tensor list is not in this checkout")
def test_every_published_tensor_has_its_name_and_shape() -> None:
    with torch.device("meta"):
        shapes = {name: list(t.shape) for name, t in Gr00t(Gr00tConfig.from_json({})).state_dict().items()}
    ours: dict[tuple[str, str], int] = {}
    for name, shape in shapes.items():
        # The list counts layers: every number in a name is written N, but for the weight sets' own.
        generic = ".".join("N" if part.isdigit() else part for part in name.split("."))
        ours[generic, str(shape)] = ours.get((generic, str(shape)), 0) + 1
    lines = (REFERENCE.parent / "facts" / "checkpoint-tensors.tsv").read_text().splitlines()
    published = {(name, shape): int(count.removeprefix("x")) for name, shape, count in (s.split("\t") for s in lines)}
    published.pop(("backbone.model.lm_head.weight", "[151936, 2048]"))
    assert ours == published
