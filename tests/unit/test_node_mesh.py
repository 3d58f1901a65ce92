"""Meshes that are refused, and the line that says why."""

from __future__ import annotations

import pytest

from node.mesh import AXES, Mesh, check_mesh, check_microbatch, microbatches, parse_mesh
from protocol.errors import ConfigError
from protocol.spec import BatchPhase, BuiltInModel, GptModel, HfModel, Inner, MoeModel

GPT = GptModel(width=64, depth=2, heads=4, context=64)
MOE = MoeModel(width=64, depth=2, heads=4, context=64, experts=6)
HF = HfModel(recipe="hf", config='{"vocab_size": 256}', context=64)


def refusal(mesh: Mesh, model: BuiltInModel = GPT, batch_size: int = 8) -> str:
    with pytest.raises(ConfigError) as caught:
        check_mesh(mesh, model, Inner(batch_size=batch_size))
    return str(caught.value)


def test_ranks_are_the_product_of_the_axes() -> None:
    assert Mesh(shard=2, tensor=3, pipeline=4).ranks == 24
    assert str(Mesh(shard=2, tensor=3)) == "shard 2 x tensor 3"
    assert str(Mesh()) == "one rank"


def test_the_command_lines_form_is_read() -> None:
    assert parse_mesh("shard=2, tensor=4") == Mesh(shard=2, tensor=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shards=2", "'shards=2' is not AXIS=SIZE; the axes are " + ", ".join(AXES)),
        ("shard", "'shard' is not AXIS=SIZE"),
        ("shard=two", "'shard=two' is not AXIS=SIZE"),
        ("shard=2,shard=2", "shard stands there twice"),
        ("shard=0", "every size is 1 to 4096"),
    ],
)
def test_a_mesh_that_is_none_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_mesh(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(tensor=3), "tensor = 3 does not divide model.heads = 4"),
        (Mesh(context=3), "context = 3 does not divide model.context = 64"),
        (Mesh(context=8), "context = 8 does not divide model.heads = 4"),
        (Mesh(shard=3), "replicate x shard x expert = 3 does not divide inner.batch_size = 8"),
        (Mesh(pipeline=3), "island.mesh.pipeline = 3 is more than model.depth = 2"),
        (Mesh(expert=2), 'island.mesh.expert needs model.recipe = "moe"'),
        (Mesh(context=2, tensor=2), "context and tensor do not go together"),
        (Mesh(pipeline=2, context=2), "pipeline and context do not go together"),
    ],
)
def test_the_axis_that_does_not_fit_is_named(mesh: Mesh, said: str) -> None:
    assert said in refusal(mesh)


def test_experts_must_divide() -> None:
    assert "expert = 4 does not divide model.experts = 6" in refusal(Mesh(expert=4), MOE)
    assert 'tensor does not go with model.recipe = "moe"' in refusal(Mesh(tensor=2), MOE)


def test_a_hugging_face_model_is_not_cut_into_stages() -> None:
    assert 'pipeline does not go with model.recipe = "hf"' in refusal(Mesh(pipeline=2), HF)


def test_every_phase_of_a_batch_ramp_is_checked() -> None:
    inner = Inner.model_validate(
        {"batch_size": 8, "batch_ramp": [{"until_tokens": 10, "batch_size": 2}]}
    )
    with pytest.raises(ConfigError, match=r"inner\.batch_ramp\[0\]\.batch_size = 2"):
        check_mesh(Mesh(shard=4), GPT, inner)


def test_what_fits_is_let_through() -> None:
    check_mesh(Mesh(replicate=2, shard=2, tensor=2, pipeline=2), GPT, Inner(batch_size=8))
    check_mesh(Mesh(replicate=2, expert=2, shard=2), MOE, Inner(batch_size=8))


@pytest.mark.parametrize(
    ("samples", "microbatch", "stages", "count"),
    [(8, None, 4, 4), (8, None, 2, 2), (8, 1, 4, 8), (6, None, 4, 6), (6, 3, 2, 2)],
)
def test_a_pipeline_cuts_a_ranks_samples_into_equal_microbatches(
    samples: int, microbatch: int | None, stages: int, count: int
) -> None:
    assert microbatches(samples, microbatch, stages) == count


@pytest.mark.parametrize(
    ("batch_size", "ramp", "microbatch"),
    [(8, (), 4), (8, (), 3), (4, (), None), (16, (4,), None), (16, (8,), 2)],
    ids=["too few", "unequal", "fewer samples than stages", "ramp", "ramp with size"],
)
def test_microbatches_that_a_pipeline_cannot_run_are_refused(
    batch_size: int, ramp: tuple[int, ...], microbatch: int | None
) -> None:
    phases = tuple(BatchPhase(until_tokens=1 + i, batch_size=size) for i, size in enumerate(ramp))
    inner = Inner(batch_size=batch_size, batch_ramp=phases)
    with pytest.raises(ConfigError, match=r"^island\.microbatch = \d+: cuts a rank's"):
        check_microbatch(Mesh(pipeline=4, shard=2), inner, microbatch)
    check_microbatch(Mesh(shard=2), inner, microbatch)
