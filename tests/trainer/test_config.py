import sys
from pathlib import Path

import pytest
import torch

from hyper_parallel.trainer.config import Config, ConfigError, load_config, parse_config
from hyper_parallel.trainer.yaml_file import read_yaml

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def problems_of(document: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(document)
    return caught.value.problems


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    assert load_config(path).num_ranks >= 1


def test_upstream_keys_reach_the_config():
    config = parse_config(
        {
            "training": {"steps": 7, "lr": 1, "max_grad_norm": 0.5, "backend": "hccl", "seed": 3},
            "accelerator": {"tp_size": 2, "ep_size": 4},
            "fsdp_config": {"dp_shard_size": 4, "enable_offload": True},
        }
    )
    training = config.training
    assert (training.steps, training.lr, training.max_grad_norm) == (7, 1.0, 0.5)
    assert (training.backend, training.seed) == ("hccl", 3)
    assert (config.accelerator.tp_size, config.accelerator.ep_size) == (2, 4)
    assert config.fsdp_config.enable_offload
    assert config.num_ranks == 8


@pytest.mark.parametrize("document", [None, {}, {"training": None}])
def test_absent_keys_keep_their_defaults(document):
    assert parse_config(document) == Config()


def test_unknown_keys_are_named_with_the_closest_known_one():
    assert problems_of({"training": {"stepz": 3}, "fsdp": {}}) == [
        "training.stepz: unknown key; did you mean steps?",
        "fsdp: unknown key; did you mean fsdp_config?",
    ]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "steps", "many"),
        ("training", "steps", 1.5),
        ("training", "steps", True),
        ("training", "steps", 0),
        ("training", "lr", "fast"),
        ("training", "lr", -1.0),
        ("training", "lr", float("inf")),
        ("training", "max_grad_norm", float("nan")),
        ("training", "max_grad_norm", 0),
        ("training", "norm_before_offload", 1),
        ("training", "clip_in_optimizer", "yes"),
        ("training", "backend", "mpi"),
        ("training", "seed", -1),
        ("training", "seed", 2**64),
        ("training", "steps", 2**70),
        ("training", "lr", 10**400),
        pytest.param("training", "lr", 16**5000, id="lr-too-long-to-print"),
        ("accelerator", "ep_size", None),
        ("fsdp_config", "enable_offload", 1),
        ("fsdp_config", "enable_offload", "yes please"),
        ("data", "path", 3),
        ("data", "path", "/no/such/file"),
        ("data", "path", ""),
    ],
)
def test_value_of_wrong_type_or_range_names_its_key(section, key, value):
    (problem,) = problems_of({section: {key: value}})
    assert problem.startswith(f"{section}.{key}: ")


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        ({"accelerator": {"ep_size": 3}}, ("accelerator.ep_size", "model.num_experts")),
        (
            {"accelerator": {"ep_size": 4}, "fsdp_config": {"dp_shard_size": 2}},
            ("accelerator.ep_size", "fsdp_config.dp_shard_size", "accelerator.tp_size"),
        ),
        ({"accelerator": {"tp_size": 8}}, ("accelerator.tp_size", "model.num_heads")),
        (
            {"accelerator": {"tp_size": 2}, "training": {"batch_size": 1, "seq_len": 7}},
            ("accelerator.tp_size", "training.batch_size", "training.seq_len"),
        ),
        ({"model": {"num_heads": 3}}, ("model.num_heads", "model.dim")),
        ({"model": {"top_k": 9}}, ("model.top_k", "model.num_experts")),
        (
            {"training": {"backend": "gloo"}, "fsdp_config": {"enable_offload": True}},
            ("fsdp_config.enable_offload", "training.backend"),
        ),
    ],
)
def test_contradiction_names_the_keys_that_contradict(document, keys):
    assert any(problem.startswith(f"{' / '.join(keys)}: ") for problem in problems_of(document))


def test_all_offenders_are_gathered():
    document = {"training": {"stepz": 3, "lr": "fast"}, "model": {"top_k": 9}, "data": 5}
    assert [problem.split(":")[0] for problem in problems_of(document)] == [
        "training.stepz",
        "training.lr",
        "data",
        "model.top_k / model.num_experts",
    ]


def test_refused_value_is_not_said_to_contradict_its_default():
    # num_experts falls back to 8 while refused, and 9 of 8 would be a second, false complaint.
    assert len(problems_of({"model": {"top_k": 9, "num_experts": "lots"}})) == 1


def test_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("training:\n  steps: 5\n  lr: 0.1\n  steps: 20\n")
    with pytest.raises(ConfigError, match="steps: given twice"):
        load_config(path)


def test_biggest_seed_is_one_that_torch_takes():
    seed = parse_config({"training": {"seed": 2**64 - 1}}).training.seed
    torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("merging", "expected"),
    [
        ("{<<: *long, steps: 7}", (7, 3)),
        ("{steps: 7, <<: *long}", (7, 3)),
        ("{<<: [*short, *long]}", (2, 3)),
        ("{<<: *nested}", (5, 9)),
    ],
    ids=["before", "after", "several", "of-a-merged-one"],
)
def test_merge_keys_give_what_is_not_given_itself(tmp_path, merging, expected):
    path = tmp_path / "merge.yaml"
    anchors = "[&long {steps: 5, seed: 3}, &short {steps: 2}, &nested {<<: *long, seed: 9}]"
    path.write_text(f"anchors: {anchors}\ntraining: {merging}\n")
    document = read_yaml(path)
    training = parse_config({"training": document["training"]}).training
    assert (training.steps, training.seed) == expected


def test_key_given_twice_beside_a_merge_is_refused(tmp_path):
    path = tmp_path / "merge.yaml"
    path.write_text("model: &small {dim: 16}\ntraining: {<<: *small, lr: 1, seed: 1, lr: 2}\n")
    with pytest.raises(ConfigError, match=r"(?s)lr: given twice.*line 2"):
        load_config(path)


def test_missing_pyyaml_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "hyper_parallel.trainer.yaml_file")
    with pytest.raises(ConfigError, match=r"pip install 'hyper-parallel\[trainer\]'"):
        load_config(CONFIGS[0])


def test_exponent_without_point_is_a_number_though_yaml_reads_text(tmp_path):
    path = tmp_path / "exponent.yaml"
    path.write_text("training: {lr: 1e-3}\n")
    assert load_config(path).training.lr == 1e-3


@pytest.mark.parametrize(
    "text", ["training: [", "\xff", "just words", "seed: 2026-99-99", "[" * 5000]
)
def test_file_that_is_no_config_is_named(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(path)


def test_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config("absent.yaml")
