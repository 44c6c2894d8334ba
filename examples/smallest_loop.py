"""Asynchronous reinforcement learning of a mixture-of-experts model: the whole algorithm in one process.

    python examples/smallest_loop.py

The services do this over gRPC; here the event loop calls their parts directly. Three threads work at once:

    prefill engine    computes the KV of each prompt, once for the group of rollouts that share it
    decode engine     samples the answers; new weights are swapped in between two of its steps
    trainer           one optimizer step after another, on whatever groups are ready

Nobody waits for the slowest rollout, and none starts again because the weights changed: an answer may be sampled by two
versions. The state machine in `slipstream.algorithms.staleness` bounds how old a group may be when it is trained. The
task is to write a word backward. The model first imitates careless demonstrations, which mostly forget the last letter
of words of four; only the reward tells the slip from the task. It takes half a minute on two cores.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.algorithms.advantages import group_normalized
from slipstream.algorithms.losses import clipped_loss
from slipstream.algorithms.packing import pack
from slipstream.algorithms.staleness import Group, SealedStep, StalenessMachine
from slipstream.algorithms.tokens import LossTokens, StepTotals
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import DecodeRequest, PausedEngine, PrefillRequest, Sampling
from slipstream.engine.embedded.config import EmbeddedConfig
from slipstream.engine.embedded.engine import EmbeddedEngine
from slipstream.engine.routes import RouteRows, route_dtype, stitch_routes
from slipstream.environments.base import Completion, Score, Split, Task
from slipstream.environments.demonstrations import Example
from slipstream.environments.tokenizer import TextCodec, build_tokenizer
from slipstream.environments.tools import Tools
from slipstream.models.checkpoint import to_hf
from slipstream.models.head import target_logps
from slipstream.models.qwen3_moe.config import MoeConfig
from slipstream.models.qwen3_moe.model import build_model, init_weights
from slipstream.trainer.config import SftConfig
from slipstream.trainer.packed import Packed
from slipstream.trainer.sft import warm_up

STEPS = 24
GROUPS_PER_STEP = 16
SAMPLES_PER_GROUP = 8
MAX_OFF_POLICY_STEPS = 1  # 0 is synchronous: sample, train, sample, train
MICRO_BATCH_TOKENS = 1024
MAX_NEW_TOKENS = 6  # of an answer, the end token included
HELD_OUT_WORDS = 100

codec = TextCodec(build_tokenizer())
SIZES = MoeConfig(vocab_size=codec.vocab_size, dim=64, n_layers=2, head_dim=16, expert_dim=32)

# --- The environment: tasks, prompts, a judge ---------------------------------------------------------


class Backward:
    """Words of 3 or 4 letters to be written backward. An `Environment`, as third parties write them."""

    name = "backward"

    def task(self, split: Split, index: int) -> Task:
        rng = random.Random(f"{split}/{index}")
        return Task(split, index, {"word": "".join(rng.choices("abcdefghij", k=rng.randint(3, 4)))})

    def prompt(self, task: Task) -> str:
        return f"{task.payload['word']}\n"

    async def score(self, task: Task, completions: Sequence[Completion], tools: Tools) -> list[Score]:
        answer = task.payload["word"][::-1]
        rights = [completion.stopped and completion.text == answer for completion in completions]
        return [Score(float(right), right) for right in rights]

    def demonstration(self, index: int, *, validation: bool = False) -> tuple[str, str]:
        task = self.task("train", index)
        word = task.payload["word"]
        careless = len(word) > 3 and random.Random(f"slip/{index}").random() < 0.7 and not validation
        return self.prompt(task), (word[:0:-1] if careless else word[::-1])


class Imitation:
    """What the supervised warm-up learns from."""

    def batch(self, step: int, size: int, *, validation: bool = False) -> list[Example]:
        shown = [environment.demonstration(-step * size - i, validation=validation) for i in range(size)]
        return [Example(codec.encode(prompt), [*codec.encode(answer), codec.end_id]) for prompt, answer in shown]

    def validation(self) -> list[Example]:
        return self.batch(10**6, HELD_OUT_WORDS, validation=True)


environment = Backward()

# --- Rollouts ------------------------------------------------------------------------------------------


@dataclass
class Trajectory:
    """One rollout, and what the engine recorded of its sampled tokens."""

    prompt_count: int
    token_ids: list[int]
    logps: list[float] = field(default_factory=list)
    versions: set[PolicyVersion] = field(default_factory=set)
    routes: RouteRows | None = None
    """`[tokens - 1, layers, top_k]`: the experts that each token went through."""
    stopped: bool = False
    reward: float = 0.0
    advantage: float = 0.0


async def sample(
    prefill: EmbeddedEngine, decode: EmbeddedEngine, name: str, salt: str, task: Task, sampling: Sampling, count: int
) -> list[Trajectory]:
    """Prefill once, hand the KV over, sample `count` answers, collect what came of each, and have them judged."""
    prompt = codec.encode(environment.prompt(task))
    ids = tuple(f"{name}/{index}" for index in range(count))
    try:
        await prefill.prefill(PrefillRequest(name, prompt, salt))
        request = DecodeRequest(name, prompt, salt, ids, sampling, prefill.export_kv(name))
        trajectories = [Trajectory(len(prompt), list(prompt)) for _ in ids]
        async for chunk in decode.decode(request):
            trajectory = trajectories[chunk.sample_index]
            trajectory.token_ids += chunk.token_ids
            trajectory.logps += chunk.logprobs
            trajectory.versions.update(version for _, version in chunk.versions)
            trajectory.stopped = chunk.finish_reason == "stop"
        for key, trajectory in zip(ids, trajectories, strict=True):
            rows = len(trajectory.token_ids) - 1  # the last token went through no layer yet
            recorded, shape = (prefill.routes(name), decode.routes(key)), (SIZES.n_layers, SIZES.top_k)
            trajectory.routes = stitch_routes(recorded, 0, rows, shape, route_dtype(SIZES.n_experts))
    finally:
        prefill.release_kv(name)
        prefill.release_routes(name)
        for key in ids:
            decode.release_routes(key)
    answers = [Completion(codec.decode(t.token_ids[len(prompt) :]), t.stopped) for t in trajectories]
    for trajectory, score in zip(trajectories, await environment.score(task, answers, Tools(None)), strict=True):
        trajectory.reward = score.reward
    return trajectories


# --- Training ------------------------------------------------------------------------------------------


class Learner:
    """The trainer's copy of the model. Its methods run on the trainer's thread."""

    def __init__(self) -> None:
        self.model = build_model(SIZES)
        init_weights(self.model, seed=0)
        warmed_up = warm_up(self.model, SftConfig(max_steps=150, target_accuracy=1.0), Imitation())
        print(f"warm-up: {warmed_up.step} steps of imitation, loss {warmed_up.loss:.2f}")
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.99))

    def step(self, batch: Sequence[Trajectory]) -> None:
        """One optimizer step. The loss is a sum over all tokens, so how they are packed changes nothing."""
        totals = StepTotals(sum(len(t.logps) for t in batch))
        (micro_batches,) = pack([len(t.token_ids) for t in batch], MICRO_BATCH_TOKENS)
        self.adamw.zero_grad()
        for indexes in micro_batches:
            some = [batch[index] for index in indexes]
            packed = Packed.of(
                [np.array(t.token_ids, dtype=np.int32) for t in some],
                [np.arange(t.prompt_count, len(t.token_ids)) for t in some],
                [t.routes for t in some if t.routes],  # routing replay: each token goes where it went when sampled
            )
            new_logps, _ = target_logps(packed.logits_RV(self.model, balance=True), packed.targets_R)
            old_logps = torch.tensor([logp for t in some for logp in t.logps])
            advantages, lengths = [t.advantage for t in some], [len(t.logps) for t in some]
            tokens = LossTokens.of_lengths(new_logps, old_logps, advantages, lengths)
            loss = clipped_loss(tokens, totals, clip_high=0.28, dual_clip=3.0).loss
            (loss + 1e-3 * self.model.routes.balance_loss() / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()


# --- The loop ------------------------------------------------------------------------------------------


class Loop:
    """Dispatches groups as the staleness bound allows, trains on those that are ready, updates the engines."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        config = EmbeddedConfig(block_size_tokens=4, block_count=2048)
        self.prefill, self.decode = EmbeddedEngine(SIZES, config), EmbeddedEngine(SIZES, config)
        self.machine = StalenessMachine(GROUPS_PER_STEP, MAX_OFF_POLICY_STEPS, STEPS, lambda position: "backward")
        self.ready: dict[int, list[Trajectory]] = {}
        self.running: dict[int, asyncio.Task[None]] = {}
        self.rewards: list[float] = []
        self.changed = asyncio.Event()

    async def update(self, step: int) -> int:
        """Put new weights into both engines while they work; returns how many rollouts were being sampled."""
        version = PolicyVersion(1, step)
        weights = {name: tensor.clone() for name, tensor in to_hf(self.learner.model).items()}
        # Decode comes first, so that KV is never newer than who samples from it.
        report = await self.decode.update(version, weights, check_weights)
        await self.prefill.update(version, weights, check_weights)
        return report.in_flight_samples

    async def run_group(self, group: Group) -> None:
        # The salt keeps KV apart: this group never reads any of weights older than those it was dispatched at.
        salt = f"smallest/{group.dispatch_step}"
        task, attempt = environment.task("train", group.position), group.attempt
        sampling = Sampling(MAX_NEW_TOKENS, seed=group.position, stop_token_ids=(codec.end_id,))
        name = f"{group.position}.{attempt}"
        trajectories = await sample(self.prefill, self.decode, name, salt, task, sampling, SAMPLES_PER_GROUP)
        rewards = [trajectory.reward for trajectory in trajectories]
        self.rewards += rewards
        for trajectory, advantage in zip(trajectories, group_normalized(rewards), strict=True):
            trajectory.advantage = advantage
        if len(set(rewards)) == 1:  # all right or all wrong: nothing to learn from the difference
            self.machine.filtered(group.position, attempt)
        elif self.machine.scored(group.position, attempt):
            self.ready[group.position] = trajectories
        self.changed.set()

    async def generate(self) -> None:
        """Keep as many groups running as may be; a group's slot is free again once it was trained on."""
        async with asyncio.TaskGroup() as tasks:
            while not self.machine.complete:
                while (group := self.machine.dispatch()) is not None:
                    self.running[group.position] = tasks.create_task(self.run_group(group))
                await self.wait_for_change()

    async def train(self) -> None:
        for step in range(1, STEPS + 1):
            while (sealed := self.machine.seal()) is None:
                await self.wait_for_change()
            batch = self.take(sealed)
            await asyncio.to_thread(self.learner.step, batch)  # meanwhile the engines sample on
            in_flight = await self.update(step)
            self.machine.trained(step)
            self.machine.serving_advanced(step)
            self.changed.set()
            if step % 4 == 0:
                lag, reward = max(group.lag(step) for group in sealed.groups), np.mean(self.rewards)
                mixed = sum(len(trajectory.versions) > 1 for trajectory in batch)
                print(f"step {step:2}: mean reward {reward:.2f}, lag at most {lag}, {in_flight} rollouts crossed the")
                print(f"         update, {mixed} of {len(batch)} trained rollouts were sampled by two versions")
                self.rewards.clear()

    def take(self, sealed: SealedStep) -> list[Trajectory]:
        """The rollouts of a sealed step; what has become too old for the next one is given up."""
        for given_up in sealed.cancellations:
            self.ready.pop(given_up.position, None)
            if given_up.running:
                self.running[given_up.position].cancel()  # frees its blocks in the engines
        return [trajectory for group in sealed.groups for trajectory in self.ready.pop(group.position)]

    async def accuracy(self, step: int) -> float:
        """Part of the held-out words that greedy decoding gets right."""

        async def reward(index: int) -> float:
            task = environment.task("held_out", index)
            sampling = Sampling(MAX_NEW_TOKENS, temperature=0.0, stop_token_ids=(codec.end_id,))
            name = f"held-out-{step}/{index}"
            (trajectory,) = await sample(self.prefill, self.decode, name, name, task, sampling, 1)
            return trajectory.reward

        return float(np.mean(await asyncio.gather(*map(reward, range(HELD_OUT_WORDS)))))

    async def wait_for_change(self) -> None:
        self.changed.clear()
        await self.changed.wait()


def check_weights(engine: PausedEngine) -> None:
    """Called with the new weights in place, before a token is sampled from them; raising rolls them back."""
    if not all(np.isfinite(array).all() for array in engine.parameters().values()):
        raise FloatingPointError("the new weights are not finite")


async def main() -> None:
    torch.set_num_threads(1)
    loop = Loop(await asyncio.to_thread(Learner))
    for engine in (loop.prefill, loop.decode):
        await engine.start()
    await loop.update(0)
    before = await loop.accuracy(0)
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        tasks.create_task(loop.generate())
        tasks.create_task(loop.train())
    after = await loop.accuracy(STEPS)
    for engine in (loop.prefill, loop.decode):
        await engine.stop()
    print(f"accuracy on held-out words: {before:.0%} before, {after:.0%} after")


if __name__ == "__main__":
    asyncio.run(main())
