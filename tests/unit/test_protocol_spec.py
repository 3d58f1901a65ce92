"""The run spec: equal meaning, equal digest; every fault one line that says where and what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from protocol.spec import (
    MAX_SPEC_BYTES,
    RunSpec,
    Sync,
    load_spec,
    parse_spec,
    spec_differences,
    spec_from_json,
)

MINIMAL: dict[str, Any] = {"name": "tiny", "target_tokens": 1_000, "data": {"text": ["a.txt"]}}


def spec(**tables: Any) -> RunSpec:
    return parse_spec(MINIMAL | tables, "run.toml")


def faults(table: Any) -> list[str]:
    """The lines of the error; each begins with the source."""
    with pytest.raises(ConfigError) as caught:
        parse_spec(table, "run.toml")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("run.toml: ") for line in lines), lines
    assert caught.value.exit_code == 2
    return [line.removeprefix("run.toml: ") for line in lines]


def fault(**tables: Any) -> str:
    (line,) = faults(MINIMAL | tables)
    return line


# --- digest ------------------------------------------------------------------------------------


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    backwards = dict(reversed(list(MINIMAL.items())))
    assert parse_spec(backwards, "b").digest() == spec().digest()


def test_a_default_written_out_gives_the_same_digest() -> None:
    full = json.loads(spec().canonical_json())
    assert parse_spec(full, "full").digest() == spec().digest()
    written = spec(outer={"lr": 0.7, "fragments": 1}, sync={"grace_s": 10})
    assert written.digest() == spec().digest()


def test_any_other_value_gives_another_digest() -> None:
    others = [
        spec(seed=1),
        spec(name="tony"),
        spec(outer={"lr": 0.8}),
        spec(sync={"quorum": 3}),
        spec(data={"text": ["a.txt", "b.txt"]}),
        spec(data={"text": ["b.txt", "a.txt"]}),
    ]
    assert len({s.digest() for s in [spec(), *others]}) == 7


def test_canonical_json_is_sorted_and_comes_back_equal() -> None:
    mine = spec(
        name="with.all-of_it",
        outer={
            "fragments": 2,
            "schedule": [
                {"from_round": 0, "inner_steps": 10},
                {"from_round": 5, "inner_steps": 40, "lr": 0.5},
            ],
        },
        data={"text": ["größe.txt", "日本.txt"]},
        sync={"durability": 3, "cell_values": 8_192},
    )
    data = mine.canonical_json()
    assert data.isascii()
    assert list(json.loads(data)) == sorted(json.loads(data))
    again = spec_from_json(data, "the run")
    assert again == mine
    assert again.canonical_json() == data
    assert again.digest() == mine.digest()


def test_a_file_and_its_table_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('target_tokens = 1000\nname = "tiny"\n[data]\ntext = ["a.txt"]\n')
    assert load_spec(path) == spec()


# --- faults ------------------------------------------------------------------------------------


def test_an_unknown_key_comes_with_the_nearest_right_one() -> None:
    assert fault(outer={"inner_step": 5}) == (
        "outer.inner_step: unknown key; did you mean 'inner_steps'?"
    )
    assert fault(target_token=5) == "target_token: unknown key; did you mean 'target_tokens'?"
    phase = {"from_round": 0, "inner_steps": 10, "momentm": 0.5}
    assert fault(outer={"schedule": [phase]}) == (
        "outer.schedule.0.momentm: unknown key; did you mean 'momentum'?"
    )
    assert fault(zzz=5) == "zzz: unknown key"


def test_a_missing_key_is_named() -> None:
    assert faults({"name": "tiny", "data": {"text": ["a.txt"]}}) == [
        "target_tokens: missing; add it"
    ]


@pytest.mark.parametrize("data", [{}, {"data": {}}, {"data": {"text": []}}])
def test_a_built_in_recipe_without_text_is_told_to_name_it(data: dict[str, Any]) -> None:
    lines = faults({"name": "tiny", "target_tokens": 1} | data)
    assert lines == ["data.text: missing; name the files to train on"]


def test_every_fault_has_a_line_of_its_own() -> None:
    lines = faults({"name": "-", "outer": {"lr": 0, "nope": 1}, "data": {"text": "a.txt"}})
    assert {line.split(":")[0] for line in lines} == {
        "name",
        "target_tokens",
        "outer.lr",
        "outer.nope",
        "data.text",
    }


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"outer": {"inner_steps": 0}}, "outer.inner_steps"),
        ({"data": {"text": [1]}}, "data.text.0"),
        ({"data": {"text": ["a"] * 1_001}}, "data.text"),
        ({"model": {"recipe": "moe", "experts": 1}}, "model.experts"),
        ({"inner": {"optimizer": "lion"}}, "inner.optimizer"),
        (
            {"inner": {"batch_ramp": [{"until_tokens": 0, "batch_size": 1}]}},
            "inner.batch_ramp.0.until_tokens",
        ),
        ({"target_tokens": 0}, "target_tokens"),
        ({"schema_version": 2}, "schema_version"),
        ({"name": "a b"}, "name"),
        ({"name": ""}, "name"),
        ({"seed": -1}, "seed"),
        ({"model": {"recipe": "evil.module"}}, "model.recipe"),
        ({"outer": {"codec": "int4"}}, "outer.codec"),
        ({"outer": {"lr": float("nan")}}, "outer.lr"),
        ({"outer": {"momentum": 1.0}}, "outer.momentum"),
        ({"sync": {"cell_values": 5_000}}, "sync.cell_values"),
        ({"sync": {"budget_s": float("inf")}}, "sync.budget_s"),
        ({"sync": {"quorum": 0}}, "sync.quorum"),
        ({"inner": {"weight_decay": float("nan")}}, "inner.weight_decay"),
        ({"inner": {"clip": float("inf")}}, "inner.clip"),
        ({"inner": {"clip": float("nan")}}, "inner.clip"),
        ({"inner": {"clip": -1.0}}, "inner.clip"),
        ({"data": "a.txt"}, "data"),
    ],
)
def test_a_value_out_of_bounds_names_its_key_and_the_value(
    tables: dict[str, Any], key: str
) -> None:
    line = fault(**tables)
    assert line.startswith(f"{key}: ")
    assert "(it is " in line


def test_a_quorum_above_the_number_of_islands_is_refused() -> None:
    line = fault(sync={"expected_islands": 3, "quorum": 4})
    assert line == "sync.quorum = 4 is more than sync.expected_islands = 3"
    assert spec(sync={"expected_islands": 3, "quorum": 3}).sync.quorum == 3


@pytest.mark.parametrize("durability", [1, 2, 5])
def test_a_durability_that_is_no_majority_is_refused(durability: int) -> None:
    line = fault(sync={"expected_islands": 4, "durability": durability})
    assert line == (f"sync.durability = {durability} must be a majority of the islands: 3 to 4")


def test_durability_is_a_majority_of_whatever_the_view_has() -> None:
    default, four = Sync(), Sync(expected_islands=5, durability=4)
    assert [default.durability_of(n) for n in range(1, 8)] == [1, 2, 2, 3, 3, 4, 4]
    assert [four.durability_of(n) for n in (3, 4, 5, 7, 9)] == [3, 4, 4, 4, 5]


@pytest.mark.parametrize("rounds", [(1,), (0, 5, 5), (0, 9, 5), (5, 0)])
def test_a_schedule_that_does_not_rise_from_zero_is_refused(rounds: tuple[int, ...]) -> None:
    schedule = [{"from_round": r, "inner_steps": 10} for r in rounds]
    line = fault(outer={"schedule": schedule})
    assert line == "outer.schedule must start at from_round = 0 and rise strictly"


def test_fragments_divide_the_inner_steps_of_every_phase() -> None:
    text = "must be a multiple of outer.fragments = 4"
    assert fault(outer={"inner_steps": 10, "fragments": 4}) == f"outer.inner_steps = 10 {text}"
    phases = [{"from_round": 0, "inner_steps": 8}, {"from_round": 3, "inner_steps": 6}]
    line = fault(outer={"inner_steps": 8, "fragments": 4, "schedule": phases})
    assert line == f"outer.inner_steps = 6 {text}"


def test_heads_divide_the_width_evenly() -> None:
    assert "even multiple of model.heads = 3" in fault(model={"width": 128, "heads": 3})
    assert "even multiple" in fault(model={"width": 12, "heads": 4})


@pytest.mark.parametrize("warmup", [1_000, 1_001])
def test_a_warmup_that_does_not_end_before_the_run_is_refused(warmup: int) -> None:
    line = fault(inner={"warmup_tokens": warmup})
    assert line == f"inner.warmup_tokens = {warmup} must be below target_tokens = 1000"
    assert spec(inner={"warmup_tokens": 999}).inner.warmup_tokens == 999


def test_a_vocabulary_of_bytes_has_room_for_every_byte() -> None:
    line = fault(model={"vocab_size": 255})
    assert line == ('model.vocab_size = 255 must be at least 256 with data.tokenizer = "bytes"')
    assert spec(model={"vocab_size": 256}).model.vocab_size == 256
    trained = {"text": ["a.txt"], "tokenizer": "bpe"}
    assert spec(model={"vocab_size": 255}, data=trained).model.vocab_size == 255


def test_a_fault_is_one_line_whatever_the_keys_and_values_are() -> None:
    assert fault(**{"a\nb\r\tc": 1}) == "a b c: unknown key"
    assert fault(outer={"inner_steps\nrun.toml: all is well": 1}).count("\n") == 0
    assert fault(outer={"codec": "int8\nrun.toml: all is well"}).startswith("outer.codec: ")


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"target_tokens": 10**5_000}, "target_tokens"),
        ({"seed": -(10**5_000)}, "seed"),
        ({"outer": {"inner_steps": 10**5_000}}, "outer.inner_steps"),
        ({"outer": {"lr": [10**5_000]}}, "outer.lr"),
        ({"name": 10**5_000}, "name"),
    ],
)
def test_an_integer_too_long_to_show_is_a_fault_like_any_other(
    tables: dict[str, Any], key: str
) -> None:
    line = fault(**tables)
    assert line.startswith(f"{key}: ")
    assert line.endswith("(it is too long to show)")


def test_a_file_with_an_integer_too_long_to_show_is_one_line(tmp_path: Path) -> None:
    """Decimal digits are limited by the parser, others are not."""
    path = tmp_path / "run.toml"
    path.write_text(f'name = "x"\ntarget_tokens = 0x{"f" * 5_000}\n[data]\ntext = ["a.txt"]\n')
    assert unreadable(path).endswith("(it is too long to show)")


def test_a_rule_about_an_integer_too_long_to_show_is_a_config_error() -> None:
    faults(MINIMAL | {"sync": {"expected_islands": 3, "quorum": 10**5_000}})
    faults(MINIMAL | {"inner": {"warmup_tokens": 10**5_000}})


def test_a_long_value_is_shown_cut() -> None:
    assert len(fault(outer={"codec": "x" * 100_000})) < 400


@pytest.mark.parametrize("table", [[], None, 3, "text"])
def test_what_is_no_table_is_one_fault(table: Any) -> None:
    (line,) = faults(table)
    assert "dictionary" in line


# --- recipes -----------------------------------------------------------------------------------

HF = {"recipe": "hf", "config": '{"vocab_size": 300, "n": "it\'s \u00e9"}', "context": 64}
RECIPE_TABLES: list[dict[str, Any]] = [
    {},
    {"recipe": "gpt", "width": 64},
    {"recipe": "moe", "experts": 4, "balance": 0.0},
    HF,
    {"recipe": "own"},
]


@pytest.mark.parametrize("model", RECIPE_TABLES)
def test_canonical_json_comes_back_equal_for_every_recipe(model: dict[str, Any]) -> None:
    mine = spec(model=model)
    again = spec_from_json(mine.canonical_json(), "the run")
    assert again == mine
    assert type(again.model) is type(mine.model)
    assert again.digest() == mine.digest()


def test_every_recipe_has_a_digest_of_its_own() -> None:
    digests = {
        spec(model={"recipe": recipe} | more).digest()
        for recipe, more in [("gpt", {}), ("moe", {}), ("hf", HF), ("own", {})]
    }
    assert len(digests) == 4


def test_a_recipe_that_does_not_exist_is_one_line_with_the_choices() -> None:
    line = fault(model={"recipe": "gtp", "width": 64})
    assert line == "model.recipe: must be one of gpt, moe, hf, own (it is 'gtp')"


@pytest.mark.parametrize(
    "recipe",
    [7, ["gpt"], None, 10**5_000, "x" * 100_000],
    ids=["int", "list", "none", "huge", "long"],
)
def test_a_recipe_of_any_kind_is_one_line(recipe: Any) -> None:
    line = fault(model={"recipe": recipe})
    assert line.startswith("model.recipe: must be one of gpt, moe, hf, own (it is ")
    assert len(line) < 400


@pytest.mark.parametrize("model", ["gpt", [], None, 3])
def test_a_model_that_is_no_table_is_one_line(model: Any) -> None:
    assert fault(model=model).startswith("model: input should be a table (it is ")


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"widht": 64}, "model.widht: unknown key; did you mean 'width'?"),
        (
            {"recipe": "moe", "expert": 4},
            "model.expert: unknown key; did you mean 'experts'?",
        ),
        ({"experts": 4}, 'model.experts: unknown key; it belongs to model.recipe = "moe"'),
        (HF | {"width": 64}, 'model.width: unknown key; it belongs to model.recipe = "gpt"'),
        (
            {"recipe": "own", "context": 64},
            'model.context: unknown key; it belongs to model.recipe = "gpt"',
        ),
        ({"gpt": {"width": 64}}, "model.gpt: unknown key"),
    ],
)
def test_an_unknown_key_of_a_model_is_named_without_the_recipe(
    model: dict[str, Any], line: str
) -> None:
    assert fault(model=model).startswith(line)


def test_a_mixture_has_as_many_experts_as_a_token_visits() -> None:
    line = fault(model={"recipe": "moe", "experts": 2, "experts_per_token": 3})
    assert line == "model.experts_per_token = 3 is more than model.experts = 2"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "missing; `atoll run init --hf SOURCE` fills it in"),
        ("", "missing; `atoll run init --hf SOURCE` fills it in"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "its vocab_size must be an integer of 2 to 1048576 (it is None)"),
        ('{"vocab_size": true}', "its vocab_size must be an integer"),
        ('{"vocab_size": 1}', "its vocab_size must be an integer"),
        ('{"vocab_size": 1048577}', "its vocab_size must be an integer"),
        ("x" * (1 << 18) + "x", "string should have at most 262144 characters"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_config_that_is_no_language_models_is_one_line(config: str | None, said: str) -> None:
    model = {"recipe": "hf"} | ({} if config is None else {"config": config})
    line = fault(model=model)
    assert line.startswith("model.config: ")
    assert said in line
    assert len(line) < 400


def test_an_own_model_needs_no_data() -> None:
    table = {"name": "tiny", "target_tokens": 1_000, "model": {"recipe": "own"}}
    mine = parse_spec(table, "run.toml")
    assert mine.data.text == ()
    with pytest.raises(ConfigError, match="give the training command"):
        _ = mine.built_in_model


def test_a_tokenizer_goes_with_the_recipe_it_belongs_to() -> None:
    data = {"text": ["a.txt"], "tokenizer": "model"}
    assert spec(model=HF, data=data).data.tokenizer == "model"
    assert fault(data=data) == 'data.tokenizer = "model" belongs to model.recipe = "hf"'
    line = fault(model={"recipe": "own"}, data={"tokenizer": "bpe"})
    assert line.startswith('data.tokenizer = "bpe" does not go with model.recipe = "own"')


@pytest.mark.parametrize("tokens", [(5, 5), (9, 5)])
def test_a_batch_ramp_that_does_not_rise_is_refused(tokens: tuple[int, ...]) -> None:
    ramp = [{"until_tokens": t, "batch_size": 2} for t in tokens]
    assert fault(inner={"batch_ramp": ramp}) == "inner.batch_ramp: until_tokens must rise strictly"
    assert len(spec(inner={"batch_ramp": ramp[:1]}).inner.batch_ramp) == 1


# --- files and networks ------------------------------------------------------------------------


def unreadable(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_spec(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}: ")
    return line


def test_a_missing_file_or_a_directory_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in unreadable(tmp_path / "none.toml")
    assert "cannot be read: Is a directory" in unreadable(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"name = ",
        b"a = 1\na = 2",
        b"\xff\xfe",
        b"name = 'x",
        b"a = " + b"[" * 100_000,
        b"a = " + b"9" * 5_000,
    ],
    ids=lambda data: data[:12].decode(errors="replace"),
)
def test_a_file_that_is_no_toml_is_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(data)
    assert "not valid TOML" in unreadable(path)


def test_a_huge_file_is_refused_unparsed(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"#" * (MAX_SPEC_BYTES + 1))
    assert "is this the right file?" in unreadable(path)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"", "not valid JSON"),
        (b" " * (MAX_SPEC_BYTES + 1), "too large"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"seed": ' + b"9" * 5_000 + b"}", "not valid JSON"),
        (b"[]", "dictionary"),
        (b'{"name": "x"}', "missing; add it"),
    ],
)
def test_json_from_a_stranger_ends_in_a_config_error(data: bytes, match: str) -> None:
    with pytest.raises(ConfigError, match=f"^the run: .*{match}"):
        spec_from_json(data, "the run")


# --- differences -------------------------------------------------------------------------------


def test_differences_name_the_keys_and_both_values() -> None:
    theirs = spec(seed=7, outer={"lr": 0.5}, sync={"quorum": 2})
    assert spec_differences(spec(), theirs) == [
        "outer.lr is 0.7 here and 0.5 in the run",
        "seed is 0 here and 7 in the run",
        "sync.quorum is None here and 2 in the run",
    ]
    assert spec_differences(theirs, theirs) == []


def test_a_difference_between_long_values_is_shown_cut() -> None:
    long = HF | {"config": '{"vocab_size": 300, "x": "' + "x" * 100_000 + '"}'}
    (line,) = spec_differences(spec(model=HF), spec(model=long | {"context": 64}))
    assert line.startswith("model.config is ")
    assert len(line) < 600
