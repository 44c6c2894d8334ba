"""Every mistake that a configuration or a command line can hold: one line, exit 2, nothing made."""

# ruff: noqa: E501 tables with one case a line
from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.engine.vllm import installed
from slipstream.launcher.cli import main
from tests.unit.chat.conversations import PLAIN_TEMPLATE, sizes, write_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"

BASE = """\
[[environments]]
type = "spell_backward"

[[environments]]
type = "expression"
"""


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs `slipstream rl` on these words and returns what it says before it exits with 2."""
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE)

    def run(*words: str) -> str:
        before = set(tmp_path.iterdir())
        with pytest.raises(SystemExit) as caught:
            main(["rl", *words])
        printed = capsys.readouterr()
        assert caught.value.code == 2, printed
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        assert set(tmp_path.iterdir()) == before, "nothing was made"
        return printed.err.removeprefix("error: ").rstrip("\n")

    return run


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[orchestrator]\ntotal_stps = 3", "x.toml: unknown key 'orchestrator.total_stps'; did you mean 'orchestrator.total_steps'?"),
        ("[orchestrator]\ntotal-stps = 3", "x.toml: unknown key 'orchestrator.total_stps'; did you mean 'orchestrator.total_steps'?"),
        ("[trainer.optim]\nlearning_rate = 1", "x.toml: unknown key 'trainer.optim.learning_rate'"),
        ("[orchestrater]\na = 1", "x.toml: unknown key 'orchestrater'; did you mean 'orchestrator'?"),
        ("[trainer.loss]\ntype = 'clipped'\nclip_lo = 1", "x.toml: unknown key 'trainer.loss.clip_lo'; did you mean 'trainer.loss.clip_low'?"),
        ("[[environments]]\ntype = 'expression'\nwieght = 1", "x.toml: unknown key 'environments.0.wieght'; did you mean 'environments.0.weight'?"),
        ("[orchestrator]\ntotal_steps = '80'", "x.toml: orchestrator.total_steps: must be a whole number (got '80')"),
        ("[orchestrator]\ntotal_steps = true", "x.toml: orchestrator.total_steps: must be a whole number (got true)"),
        ("[orchestrator]\ntotal_steps = 1.5", "x.toml: orchestrator.total_steps: must be a whole number (got 1.5)"),
        ("[orchestrator]\ntotal_steps = 99999999999999999999", "x.toml: orchestrator.total_steps: must be a whole number of 64 bits (got 99999999999999999999)"),
        ("[orchestrator]\ntotal_steps = 0", "x.toml: orchestrator.total_steps: must be at least 1 (got 0)"),
        ("[orchestrator]\nstep_quotas = 1", "x.toml: orchestrator.step_quotas: must be true or false (got 1)"),
        ("[orchestrator]\nstep_quotas = 'yes'", "x.toml: orchestrator.step_quotas: must be true or false (got 'yes')"),
        ("[trainer.optim]\nlr = inf", "x.toml: trainer.optim.lr: must be a finite number (got inf)"),
        ("[launcher]\nstart_timeout_s = 1e300", "x.toml: launcher.start_timeout_s: must be at most 1000000 (got 1e+300)"),
        ("[router]\nlease_ttl_s = 3e6", "x.toml: router.lease_ttl_s: must be at most 1000000 (got 3000000.0)"),
        ("[trainer.optim]\nlr = nan", "x.toml: trainer.optim.lr: must be a finite number (got nan)"),
        ("[trainer.optim]\nbetas = [0.9, 1.0]", "x.toml: trainer.optim.betas.1: must be below 1 (got 1.0)"),
        ("[trainer.optim]\nbetas = 0.9", "x.toml: trainer.optim.betas: must be a list (got 0.9)"),
        ("[run]\nname = 7", "x.toml: run.name: must be text, in quotes (got 7)"),
        ("[run]\nname = 'a/b'", "x.toml: run.name: must match "),
        ("[run]\ndirectory = 7", "x.toml: run.directory: must be a path, in quotes (got 7)"),
        ("trainer = 5", "x.toml: trainer: must be a table (got 5)"),
        ("environments = []", "x.toml: environments: must have at least one item"),
        ("environments = 'demo'", "x.toml: environments: must be a list of tables, each below [[environments]] (got 'demo')"),
        ("[launcher]\nrestart = 'on-failure'", "x.toml: launcher.restart: must be 'never' or 'on_failure' (got 'on-failure'); did you mean 'on_failure'?"),
        ("[trainer.loss]\nclip_low = 0.1", "x.toml: trainer.loss.type is required; it is one of masked_ratio, clipped"),
        ("[trainer.loss]\ntype = 'cliped'", "x.toml: trainer.loss.type: 'cliped' is none of masked_ratio, clipped, ppo, grpo, dr_grpo, dapo, gspo, cispo, token_truncated, sequence_truncated, icepop, distillation, import; did you mean 'clipped'?"),
        ("[trainer.loss]\ntype = 'dr_grpo'", "x.toml: trainer.loss.fixed_length_tokens is required"),
        ("[trainer.loss]\ntype = 'dr_grpo'\nfixed_length_tokens = 0", "x.toml: trainer.loss.fixed_length_tokens: must be at least 1 (got 0)"),
        ("[trainer.loss]\ntype = 'ppo'\nclip_low = 1.5", "x.toml: trainer.loss.clip_low: must be at most 1 (got 1.5)"),
        ("[trainer.loss]\ntype = 'icepop'\nratio_low = 1.5", "x.toml: trainer.loss.ratio_low: must be at most 1 (got 1.5)"),
        ("[trainer.loss]\ntype = 'token_truncated'\nratio_cap = 0.5", "x.toml: trainer.loss.ratio_cap: must be at least 1 (got 0.5)"),
        ("[trainer.loss]\ntype = 'gspo'\nreference_kl_coefficient = -1", "x.toml: trainer.loss.reference_kl_coefficient: must be at least 0 (got -1)"),
        ("[trainer.loss]\ntype = 'distillation'", "x.toml: trainer.loss.teacher is required"),
        ("[trainer.loss]\ntype = 'import'\npath = 'mine'", "x.toml: trainer.loss.path: must match "),
        ("[orchestrator.advantage]\ntype = 'grop_mean'", "x.toml: orchestrator.advantage.type: 'grop_mean' is none of group_normalized, group_mean, leave_one_out, max_rl, length_penalized, import; did you mean 'group_mean'?"),
        ("[orchestrator.advantage]\ntype = 'length_penalized'\nweight = -1", "x.toml: orchestrator.advantage.weight: must be at least 0 (got -1)"),
        ("[[environments]]\nweight = 1", "x.toml: environments.0.type is required; it is one of spell_backward, expression, reasoning_gym, maths, "),
        ("[[environments]]\ntype = 'speling'", "x.toml: environments.0.type: 'speling' is none of spell_backward, expression, reasoning_gym, maths, "),
        ("[[environments]]\ntype = 'import'\nname = 'a'", "x.toml: environments.0.path is required"),
        ("[[environments]]\ntype = 'import'\nname = 'a'\npath = 'a.b'", "x.toml: environments.0.path: must match "),
        ("[[environments]]\ntype = 'expression'\nmax_target = 100", "x.toml: environments.0.max_target: the range holds no more numbers"),
        ("[model]\ntop_k = 9", "x.toml: model.top_k: must not exceed n_experts, 4 (got 9)"),
        ("[model]\nhead_dim = 31", "x.toml: model.head_dim: must be even"),
        ("[model]\nn_heads = 3", "x.toml: model.n_kv_heads: must divide n_heads, 3 (got 2)"),
        ("[launcher]\nlog_limit_bytes = '64MB'", "x.toml: launcher.log_limit_bytes: must be a whole number of bytes (got '64MB')"),
        ("[run]\nseed = true", "x.toml: run.seed: must be a whole number (got true)"),
        ("[run]\nname = 'a b'", "x.toml: run.name: must match ^[A-Za-z0-9][A-Za-z0-9_.-]*$, that is letters, digits, _, . and -, and first a letter or digit (got 'a b')"),
        ("[environments]\ntype = 'expression'", "x.toml: environments: must be a list of tables, each below [[environments]]"),
        ("[trainer.loss]\ntype = 'gpro'", "x.toml: trainer.loss.type: 'gpro' is none of masked_ratio, clipped, ppo, grpo, dr_grpo, dapo, gspo, cispo, token_truncated, sequence_truncated, icepop, distillation, import; did you mean 'grpo'?"),
        ("[trainer.loss]\ntype = 'PPO'", "x.toml: trainer.loss.type: 'PPO' is none of masked_ratio, clipped, ppo, grpo, dr_grpo, dapo, gspo, cispo, token_truncated, sequence_truncated, icepop, distillation, import; did you mean 'ppo'?"),
        ("[data]\ntrain = 'a.jsonl'", "x.toml: has [data], so it is for fine-tuning: slipstream sft @ x.toml, not slipstream rl"),
        ("[orchestrator]\nmin_group_size = 30", "x.toml: orchestrator.min_group_size: must not exceed samples_per_group"),
        ("[tls]\ncert_file = 'a.pem'", "x.toml: tls: key_file and ca_file not set: cert_file, key_file and ca_file go together"),
        ("[trainer]\nlrr = 1", "x.toml: unknown key 'trainer.lrr'; did you mean 'trainer.optim.lr'?"),
        ("[trainer]\nmax_of_policy_steps = 1", "x.toml: unknown key 'trainer.max_of_policy_steps'; did you mean 'orchestrator.max_off_policy_steps'?"),
        ("[run]\nsead = 1\n[orchestrator]\ntotal_steps = 0\nstep_quotas = 1", "x.toml: unknown key 'run.sead'; did you mean 'run.seed'?; and x.toml: orchestrator.total_steps: must be at least 1 (got 0); and x.toml: orchestrator.step_quotas: must be true or false (got 1)"),
        ("[trainer]\ndevices = [900]", "x.toml: trainer.devices: there is no card 900; this machine has "),
        ("[trainer]\ntorch_threads = 100000", "x.toml: trainer.torch_threads is 100000; on "),
        ("[decode.engine]\nblock_count = 1000000000", "x.toml: decode.engine.block_count: the run needs about "),
        ("[orchestrator.disk]\nmin_free_bytes = 1000000000000000000", "x.toml: orchestrator.disk.min_free_bytes is 1000000000000000000; the disk of "),
        ("[run]\ndirectory = '/proc/runs'", "x.toml: run.directory: '/proc' cannot be written to: "),
        ("[runner]\nenvironment_timeout_s = 0.001", "x.toml: runner.environment_timeout_s is 0.001, in which nothing can answer; set at least 1"),
        ("[weights]\nlease_s = 0.01", "x.toml: weights.lease_s is 0.01, in which nothing can answer; set at least 1"),
        ("[[environments]]\ntype = 'expression'\ndeadline_s = 0.01", "x.toml: environments.0.deadline_s is 0.01, in which no group can end; set at least 1"),
        ("[[environments]]\ntype = 'expression'\nmemory_limit_bytes = 1", "x.toml: environments.0.memory_limit_bytes is 1; its process takes more before it does anything: "),
        ("[[environments]]\ntype = 'expression'\ntrain_task_count = 5\ncurriculum = { enabled = true, parts = 6 }", "x.toml: environments.0.curriculum.parts is 6, above environments.0.train_task_count = 5: a part has a task at least"),
        ("[sandbox.default_limits]\nwall_s = 900", "x.toml: sandbox.default_limits.wall_s: is above max_limits.wall_s"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_file_and_limit(refused, text, says):
    Path("x.toml").write_text(text + "\n")
    assert refused("@", "base.toml", "@", "x.toml").startswith(says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"seed = = 5\n", "x.toml, line 1, column 8: not TOML: invalid value, in 'seed = = 5'"),
        (b"[run]\nseed 5\n", "x.toml, line 2, column 6: not TOML: expected '='"),
        (b"[run\n", "x.toml, line 1, column 5: not TOML: expected ']'"),
        (b"[run]\nseed = 5\nseed = 6\n", "x.toml, line 3, column 9: not TOML: this key or table stands in the file already"),
        (b"[run]\n[run]\n", "x.toml, line 2, column 5: not TOML: this key or table stands in the file already"),
        (b"[run]\nname = \"a\xff\"\n", "x.toml, line 2: byte 15 is not UTF-8"),
        (b"\xff\xfe[\x00r\x00", "x.toml, line 1: byte 0 is not UTF-8"),
        (b"a = " + b"[" * 5000, "x.toml: not TOML: nested too deeply"),
        (b"#" * (1 << 21), "x.toml: is larger than 1 MiB"),
        (b"[orchestrator]\ntotal-steps = 1\ntotal_steps = 2\n", "'total_steps' is set twice, as 'total_steps' and as 'total_steps'"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_toml_says_where(refused, content, says):
    Path("x.toml").write_bytes(content)
    assert refused("@", "x.toml").startswith(says)


def test_a_file_that_cannot_be_read_says_why(refused, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.toml").write_text(BASE)
    assert refused("@", "bsae.toml") == "bsae.toml: no such file; did you mean 'base.toml'?"
    assert refused("@", "folder") == "folder: is a directory, not a TOML file; did you mean 'folder/a.toml'?"
    assert refused("@", "base.toml/x") == "base.toml/x: cannot be read: Not a directory"
    assert refused("@", "a\0b").startswith("a\\x00b: cannot be read: ")
    assert refused("@", "n" * 300).startswith(f"{'n' * 300}: cannot be read: File name too long")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("base.toml",), "unexpected argument 'base.toml'; a config file follows an '@': @ base.toml"),
        (("@", "base.toml", "--dryrun"), "--dryrun is no flag; did you mean '--dry-run'?"),
        (("@", "base.toml", "--dry-run=true"), "--dry-run takes no value"),
        (("@", "base.toml", "-x"), "unexpected argument '-x'; flags are --section.field=VALUE, --dry-run and --help"),
        (("@", "base.toml", "run.seed=1"), "unexpected argument 'run.seed=1'; did you mean '--run.seed=1'?"),
        (("@", "base.toml", "-run.seed=1"), "unexpected argument '-run.seed=1'; did you mean '--run.seed=1'?"),
        (("@", "base.toml", "twice"), "unexpected argument 'twice'; expected '@ FILE.toml' or '--section.field=VALUE'"),
        (("@",), "a config file must follow '@'"),
        (("@", "base.toml", "--run.seed"), "--run.seed needs a value: --run.seed=VALUE"),
        (("@", "base.toml", "--run.seed", "--dry-run"), "--run.seed needs a value: --run.seed=VALUE"),
        (("@", "base.toml", "--run.seed="), "--run.seed: must be a whole number (got '')"),
        (("@", "base.toml", "--run.seed=1\nx=2"), "--run.seed: must be a whole number (got '1\\nx=2')"),
        (("@", "base.toml", "--seed=1"), "--seed: unknown key 'seed'; did you mean 'run.seed'?"),
        (("@", "base.toml", "--run..seed=1"), "--run..seed: unknown key 'run.'"),
        (("@", "base.toml", "--=1"), "unexpected argument"),
        (("@", "base.toml", "--environments.2.weight=1"), "--environments.2.weight: environments has no item '2'; it has 0 (spell_backward), 1 (expression)"),
        (("@", "base.toml", "--environments.expresion.weight=1"), "--environments.expresion.weight: environments has no item 'expresion'"),
        (("@", "base.toml", "--environments.0.weight=-1"), "--environments.0.weight: must be above 0 (got -1)"),
        (("--help", "trainr"), "--help: there is no section 'trainr'; did you mean 'trainer'?"),
        ((), "no configuration is given; for the demo: slipstream rl @ examples/demo.toml"),
        (("--run.seed=1",), "environments is required: [[environments]] in a file before its overlays"),
        (("--config", "base.toml"), "--config: a config file follows an '@': @ base.toml"),
        (("@", "base.toml", "--lr=1"), "--lr: unknown key 'lr'; did you mean 'sft.lr' or 'trainer.optim.lr'?"),
        (("@", "base.toml", "--trainer.lr=1"), "--trainer.lr: unknown key 'trainer.lr'; did you mean 'trainer.optim.lr'?"),
        (("@", "base.toml", "--orchestrator.tracking=wadnb"), "--orchestrator.tracking: 'wadnb' is none of tensorboard, wandb, trackio; did you mean 'wandb'?"),
        (("@", "base.toml", "--launcher.start-timeout-s=3m"), "--launcher.start-timeout-s: must be a number of seconds (got '3m')"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_says_what_was_meant(refused, words, says):
    assert refused(*words).startswith(says)


def test_a_key_that_is_like_no_other_has_no_suggestion(refused):
    said = refused("@", "base.toml", "--orchestrator.listen.port=1")
    assert said == "--orchestrator.listen.port: unknown key 'orchestrator.listen'"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--decode.replicas=0", "--decode.replicas: must be at least 1 (got 0)"),
        ("--prefill.engine.block-size-tokens=16", "--prefill.engine.block-size-tokens is 16, decode.engine.block_size_tokens is 8; they must"),
        ("--decode.engine.type=vllm", '--decode.engine.type: prefill.engine.type is "embedded", decode.engine.type is "vllm", which cannot read its KV; give both the same engine, or set prefill.replicas = 0'),
        ("--decode.engine.type=vllm --prefill.engine.type=vllm", 'prefill.engine.connector is "none", so vLLM hands no KV over; set both to "nixl", or set prefill.replicas = 0'),
        ("--decode.engine.type=vllm --prefill.engine.type=vllm --prefill.engine.connector=nixl", '--prefill.engine.connector is "nixl", decode.engine.connector is "none"; KV needs the same'),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.engine.connector=nixl", '--decode.engine.connector is "nixl", and with prefill.replicas = 0 nobody sends it KV; set it to "none"'),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.engine.dtype=bfloat16", '--decode.engine.dtype: trainer.probe_tolerance is 0.001, and with decode.engine.dtype = "bfloat16" log-probabilities differ by more: every version would fail its probe; set it to 0.25'),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.engine.dtype=bfloat16 --decode.engine.quantization=fp8_per_tensor --trainer.probe-tolerance=0.5", '--decode.engine.quantization is "fp8_per_tensor" and needs a GPU; the vLLM that is installed runs on "cpu"'),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.engine.device=cuda", '--decode.engine.device is "cuda", and the vLLM that is installed runs on "cpu"'),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.engine.offload.memory-bytes=65536 --model.max-context-tokens=4096", "--decode.engine.offload.memory-bytes is 65536; one whole context needs 6291456"),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.engine.offload.memory-bytes=10000000000000", "--decode.engine.offload.memory-bytes is 10000000000000; 2 worker(s) take that from /dev/shm, which has "),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.engine.offload.mooncake-master=127.0.0.1:99999 --decode.engine.offload.mooncake-bytes=1000000", "--decode.engine.offload.mooncake-master: must be host:port, with a port from 1 to 65535"),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.engine.offload.memory-bytes=67108864 --decode.engine.offload.disk-bytes=1000000 --decode.engine.offload.directory=/proc/blocks", "--decode.engine.offload.directory: '/proc' cannot be written to"),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.engine.offload.memory-bytes=67108864 --decode.engine.offload.disk-bytes=1000000 --decode.engine.offload.directory=base.toml/blocks", "base.toml' is no directory"),
        ("--decode.engine.connector=nixl", "--decode.engine.connector: unknown key 'decode.engine.connector'; it is known beside decode.engine.type = 'vllm' only"),
        ("--decode.engine.type=vllm --prefill.engine.type=vllm --prefill.engine.connector=nixl --decode.engine.connector=nixl --prefill.engine.dtype=bfloat16", '--prefill.engine.dtype is "bfloat16", decode.engine.dtype is "float32", which cannot read its KV'),
        ("--decode.engine.type=vllm --prefill.replicas=0 --decode.replicas=2 --decode.engine.side-channel-port=80", "--decode.engine.side-channel-port is 80 for 2 workers, and each needs a port of its own"),
        ("--decode.engine.type=vllm --prefill.replicas=0 --model.architecture=colorsys", 'model.architecture is "colorsys", whose code vLLM does not run; set decode.engine.type = "embedded"'),
        ("--decode.engine.type=vllm --prefill.replicas=0 --model.max-context-tokens=256 --decode.engine.block-count=16", "--decode.engine.block-count is 16; two contexts of 256 tokens need at least 18 blocks of 32 tokens"),
        ("--decode.engine.block-count=8", "--decode.engine.block-count is 8; two contexts of 64 tokens need at least 16 blocks"),
        ("--model.max-context-tokens=100000", "--model.max-context-tokens: prefill.engine.block_count is 4096; two contexts of 100000 tokens need"),
        ("--decode.engine.max-running-samples=4", "--decode.engine.max-running-samples is 4, below orchestrator.samples_per_group = 8"),
        ("--orchestrator.samples-per-group=200", "--orchestrator.samples-per-group: decode.engine.max_running_samples is 128, below"),
        ("--environments.1.max-new-tokens=64", "--environments.1.max-new-tokens is 64; with its prompt that must fit model.max_context_tokens = 64"),
        ("--trainer.probe-tokens=65", "--trainer.probe-tokens is 65, above model.max_context_tokens = 64"),
        ("--runner.renderer.type=renderers --runner.renderer.family=qwen3", "runner.renderer: a random start has the tokenizer of no family; it takes trainer.initial_model"),
        ("--orchestrator.data-ranks=2", "--orchestrator.data-ranks is 2, but one trainer is started; set it to 1"),
        ("--environments.0.demonstration-weight=0 --environments.1.demonstration-weight=0", "--environments.0.demonstration-weight is 0, and nothing else has demonstrations"),
        ("--environments.0.evaluation-task-count=0 --environments.1.evaluation-task-count=0", "--environments.0.evaluation-task-count: evaluation.before is true, but every environment has"),
        ("--broadcaster.max-store-bytes=1000000", "--broadcaster.max-store-bytes is 1000000; 3 kept versions of this model and a new one need "),
        ("--orchestrator.groups-per-step=1000000", "--orchestrator.groups-per-step: runner.spool_limit_bytes is 268435456; the 8000000 rollouts"),
        ("--teacher.replicas=1", '--teacher.replicas is 1, and the loss asks no teacher; set trainer.loss.type = "distillation"'),
        ("--trainer.loss.type=distillation --trainer.loss.teacher=nowhere --teacher.replicas=1", "--trainer.loss.teacher 'nowhere' is no directory"),
        ("--sandbox.enabled=false", '--sandbox.enabled is false, and environments.1 is of type "expression", which runs programs there'),
        ("--environments.1.sandbox-wall-s=601", "--environments.1.sandbox-wall-s is 601, above sandbox.max_limits.wall_s = 600"),
        ("--orchestrator.runner-lease-ttl-s=1", "--orchestrator.runner-lease-ttl-s is 1; runners report each second"),
        ("--orchestrator.keeper.away-after-s=1", "--orchestrator.keeper.away-after-s is 1; it must exceed orchestrator.keeper.poll_interval_s = 1"),
        ("--trainer.nproc=3 --trainer.parallel.expert=3", "--trainer.parallel.expert: 3 ranks cannot share 4 experts evenly"),
        ("--trainer.nproc=3 --trainer.parallel.context=3", "--trainer.parallel.context: 3 ranks cannot share 4 heads and 2 key-value heads evenly"),
        ("--trainer.lora.targets=[\"nope\"]", "--trainer.lora.targets: the model has no 'nope'; it has down_proj, gate_proj, "),
        ("--trainer.lora.targets=[\"mlp\"]", "--trainer.lora.targets: the model has nothing of mlp"),
        ("--trainer.lora.targets=[\"q_proj\"]", "--trainer.lora.targets: q_proj, k_proj, v_proj are one matrix: name all or none"),
        ("--trainer.fp8.targets=[\"nope\"]", "--trainer.fp8.targets: the model has no 'nope'; it has down_proj, gate_proj, "),
        ("--trainer.optim.groups=[{pattern=\"nope\"}]", "trainer.optim.groups.0.pattern: 'nope' matches none of the "),
        ("--trainer.optim.groups=[{pattern=\"norm\"}] --trainer.lora.rank=4", "trainer.optim.groups.0.pattern: 'norm' matches none of the "),
        ("--trainer.nproc=2 --trainer.lora.rank=4", "trainer.lora.publish: several ranks publish merged weights"),
        ("--trainer.nproc=2 --trainer.lora.publish=adapter", "--trainer.lora.publish: several ranks publish merged weights"),
        ("--trainer.nproc=2 --weights.transport=shm --weights.lease-s=200", "trainer.parallel.timeout_s: a rank may wait for a reader for weights.lease_s: say less there"),
        ("--weights.transport=nccl --weights.backend=nccl", 'weights.backend: compute.device = "cpu" sends by gloo alone'),
        ("--environments.1.name=spell_backward", "environments: names must differ"),
        ("--environments.0.min-word-len=9", "--environments.0.min-word-len"),
        ("--model.vocab-size=50", "--model.vocab-size is 50; the tokenizer has 1"),
        ("--trainer.initial-model=nowhere", "--trainer.initial-model 'nowhere' is no directory; it must be the model/ of a run"),
        ("--tls.cert-file=a --tls.key-file=b --tls.ca-file=c", "a: no such file or directory; `slipstream certs` makes new ones"),
        ("--sandbox.bwrap=nowhere", "--sandbox.bwrap 'nowhere' is no program that can run"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_together_are_refused_before_any_start(refused, flags, says):
    said = refused("@", "base.toml", *flags.split())
    assert says in said


def test_settings_that_fit_the_model_pass(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE)
    shared = ["--trainer.nproc=4", "--trainer.parallel.expert=4", "--trainer.parallel.context=2"]
    trained = ["--trainer.lora.publish=merged", '--trainer.fp8.targets=["experts"]', "--trainer.probe-tolerance=1"]
    rest = ['--trainer.optim.groups=[{pattern="lora_b"}]', "--trainer.checkpoint.interval-steps=5"]
    with pytest.raises(SystemExit) as caught:
        main(["rl", "@", "base.toml", *shared, *trained, *rest, "--dry-run"])
    assert caught.value.code == 0, capsys.readouterr().err


def test_a_run_on_vllm_where_that_is_not_installed_is_told_what_to_type(refused, monkeypatch):
    monkeypatch.setattr(installed, "DISTRIBUTIONS", ("not-installed",))
    said = refused("@", "base.toml", "--decode.engine.type=vllm", "--prefill.replicas=0")
    assert said == '--decode.engine.type is "vllm", which is not installed; install it with: make install-vllm'


def test_a_connector_that_is_not_installed_is_told_of_before_any_start(refused, monkeypatch):
    monkeypatch.setitem(installed._PACKAGES, "mooncake", "not_installed")
    pools = [
        f"--{pool}.engine.{words}" for pool in ("prefill", "decode") for words in ("type=vllm", "connector=mooncake")
    ]
    said = refused("@", "base.toml", *pools)
    problem = '--prefill.engine.connector is "mooncake", which is not installed'
    assert said == f"{problem}; install it with: pip install 'slipstream[mooncake]'"


def test_a_model_directory_without_its_files_is_refused(refused, tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    said = refused("@", "base.toml", "--trainer.initial-model", "run")
    assert said == "--trainer.initial-model 'run' has no config.json; did you mean 'run/model'?"
    assert "has no tokenizer.json" in refused("@", "base.toml", "--trainer.initial-model", "run/model")
    for name in ("tokenizer.json", "model.safetensors"):
        (run / "model" / name).write_text("{}")
    said = refused("@", "base.toml", "--trainer.initial-model", "run/model")
    assert said.endswith('is of the model_type "llama": it takes model.architecture = "llama"')
    (run / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert "config.json has no 'vocab_size'" in refused("@", "base.toml", "--trainer.initial-model", "run/model")


def test_a_help_narrows_to_a_section(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["rl", "--help", "trainer.optim"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--trainer.optim.lr NUMBER  (above 0, default 0.001)" in printed
    assert "--orchestrator" not in printed


def test_help_shows_no_type_of_python_and_every_variant(capsys):
    with pytest.raises(SystemExit):
        main(["rl", "--help"])
    printed = capsys.readouterr().out
    for word in ("PosixPath", "typing", "Optional", "None", "<class", "Annotated", "PydanticUndefined", "{}"):
        assert word not in printed
    assert "--runner.spool-limit-bytes BYTES  (at least 1 MiB, default 256 MiB)" in printed
    kinds = " ".join(printed.partition("  type  spell_backward")[2].split())
    assert kinds.startswith(
        "| expression | reasoning_gym | maths | python_code | terminal | verifiers | textarena | openenv"
    )
    assert '  type = "clipped"' in printed
    assert "--launcher.restart never|on_failure  (default never)" in printed
    assert max(map(len, printed.splitlines())) <= 120


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("demo*.toml")), ids=lambda path: path.name)
def test_the_examples_pass_every_check(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["rl", "@", str(EXAMPLES / "demo.toml"), "@", str(example), "--dry-run"])
    assert caught.value.code == 0, capsys.readouterr().err


def test_a_flag_sets_one_item_of_a_list_by_number_or_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE)
    flags = ["--environments.0.weight=2", "--environments.expression.weight", "5"]
    with pytest.raises(SystemExit):
        main(["rl", "@", "base.toml", *flags, "--dry-run"])
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("weight = ")] == ["weight = 2.0", "weight = 5.0"]


def test_the_fine_tuning_example_passes_every_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["sft", "@", str(EXAMPLES / "sft-smollm2.toml"), "--dry-run"]
    for missing, made in (
        ("start.initial 'smollm2' is no directory", lambda: Path("smollm2").mkdir()),
        ("data.train 'sums.jsonl' is no file", Path("sums.jsonl").touch),
    ):
        with pytest.raises(SystemExit) as refused:
            main(asked)
        assert refused.value.code == 2
        assert missing in capsys.readouterr().err
        made()
    with pytest.raises(SystemExit) as shown:
        main(asked)
    assert shown.value.code == 0
    assert "max_steps = 12" in capsys.readouterr().out


def test_a_run_of_another_kind_is_not_resumed_as_a_fine_tuning(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(BASE)
    for asked, said in (
        (["--resume"], "--resume must be followed by a run"),
        (["--resume", str(tmp_path)], "is no fine-tuning: its config.toml has no [data]"),
        (["--resume", str(tmp_path), "@", str(EXAMPLES / "sft-smollm2.toml")], "it takes no file"),
    ):
        with pytest.raises(SystemExit):
            main(["sft", *asked])
        assert said in capsys.readouterr().err


def test_the_smollm2_examples_pass_every_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start = Path("runs/sft-smollm2/model")
    start.mkdir(parents=True)
    write_tokenizer(start, PLAIN_TEMPLATE)
    (start / "model.safetensors").touch()
    (start / "config.json").write_text(json.dumps({**sizes().to_hf(), "max_position_embeddings": 4096}))
    card = ["rl", "@", str(EXAMPLES / "smollm2-h200.toml")]
    for asked in (card, [*card, "@", str(EXAMPLES / "smollm2-cpu.toml")]):
        with pytest.raises(SystemExit) as caught:
            main([*asked, "--dry-run"])
        assert caught.value.code == 0, capsys.readouterr().err
    assert 'device = "cpu"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("rl", "@", "base.toml", "--run.directory={}"),
        ("rl", "@", "base.toml", "--trainer.initial_model={}"),
        ("certs", "{}"),
    ],
)
@pytest.mark.parametrize("path", ["n" * 300, "loop/a"])
def test_a_path_that_can_name_nothing_is_told_in_one_line_by_every_command(tmp_path, monkeypatch, capsys, words, path):
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE)
    Path("loop").symlink_to("loop")
    with pytest.raises(SystemExit) as ended:
        main([word.format(path) for word in words])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert path.split("/")[0] in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["base.toml", "loop"]
