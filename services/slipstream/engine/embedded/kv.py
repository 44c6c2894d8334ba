"""The paged KV pool, the expert routes of the same positions, and the engine's context: attention over them.

One tensor holds all KV, `[layers, 2, blocks, block_size, kv_heads, head_dim]`; a *slot* is a position in it,
`block * block_size + offset`. In every step each layer first writes the keys and values of the new tokens into their
slots, then gathers whole blocks by the block tables into a padded batch and attends there. Expert ids of every computed
position are kept in slots beside the KV, so that a prefix-cache hit brings its routes along.

The last block of the pool's tensor belongs to nobody: tables are padded with it.

T = new tokens, R = sequences, M = blocks a table, C = padded context, N = query heads, G = KV heads, H = head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.engine.routes import RouteRows, route_dtype, runs
from slipstream.models.base import Sizes


class RouteSlots:
    """Expert ids by slot, and whether they are known."""

    def __init__(self, sizes: Sizes, slots: int) -> None:
        dtype = route_dtype(sizes.n_experts)
        self._rows = np.full((slots, sizes.moe_layers, sizes.top_k), np.iinfo(dtype).max, dtype)
        self._known = np.zeros(slots, dtype=bool)

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        self._rows[slots] = rows
        self._known[slots] = True

    def forget(self, slots: np.ndarray) -> None:
        """Whatever computed these slots, its experts are not known here."""
        self._rows[slots] = np.iinfo(self._rows.dtype).max
        self._known[slots] = False

    def read(self, slots: np.ndarray, first_position: int) -> RouteRows:
        """A copy of consecutive positions."""
        return RouteRows(self._rows[slots], first_position, runs(~self._known[slots], first_position))

    def known(self, slots: np.ndarray) -> bool:
        """Whether the experts of all of them are."""
        return bool(self._known[slots].all())

    def copy_blocks(self, sources: list[int], targets: list[int], block_size: int) -> None:
        for array in (self._rows, self._known):
            blocks = array.reshape(len(array) // block_size, block_size, *array.shape[1:])
            blocks[targets] = blocks[sources]


class KvPool:
    """KV and routes by slot. `scratch_blocks` extra blocks serve probes."""

    def __init__(self, sizes: Sizes, block_count: int, block_size: int, scratch_blocks: int) -> None:
        self.sizes = sizes
        self.block_size = block_size
        self.scratch = list(range(block_count, block_count + scratch_blocks))
        self.padding_block = block_count + scratch_blocks
        total = self.padding_block + 1
        self.tensor = torch.zeros(sizes.n_layers, 2, total, block_size, sizes.n_kv_heads, sizes.head_dim)
        self.slots = total * block_size
        # The same memory as rows: slots for writing and blocks for reading, keys first, then values.
        self.layer_slots = [layer.view(2 * self.slots, -1) for layer in self.tensor]
        self.layer_blocks = [layer.view(2 * total, -1) for layer in self.tensor]
        self.total_blocks = total
        self._buffer = self.layer_blocks[0].new_empty(0, self.layer_blocks[0].shape[1])
        self.routes = RouteSlots(sizes, self.slots)

    def context_buffer(self, rows: int) -> Tensor:
        """Room for gathered blocks, reused by all layers and steps: fresh memory would be paged in each time."""
        if self._buffer.shape[0] < rows:
            self._buffer = self.layer_blocks[0].new_empty(rows * 2, self.layer_blocks[0].shape[1])
        return self._buffer[:rows]

    def slots_of(self, table: Sequence[int], start: int, end: int) -> np.ndarray:
        """Slots of positions `start` to `end - 1` of the sequence whose blocks are `table`."""
        positions = np.arange(start, end)
        return np.asarray(table, np.int64)[positions // self.block_size] * self.block_size + positions % self.block_size

    def read(self, slots: np.ndarray) -> Tensor:
        """A contiguous copy of the KV in these slots, `[layers, 2, tokens, kv_heads, head_dim]`."""
        return self.tensor.flatten(2, 3).index_select(2, torch.from_numpy(slots))

    def write(self, slots: np.ndarray, kv: Tensor) -> None:
        """Put KV of another engine into these slots; its routes are not known here."""
        self.tensor.flatten(2, 3).index_copy_(2, torch.from_numpy(slots), kv)
        self.routes.forget(slots)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks."""
        self.tensor[:, :, targets] = self.tensor[:, :, sources]
        self.routes.copy_blocks(sources, targets, self.block_size)

    def decode_step(self, tables_RM: Tensor, positions_R: Tensor) -> PagedStep:
        """One new token for each sequence, at these positions."""
        block_R = tables_RM.gather(1, (positions_R // self.block_size).unsqueeze(1)).squeeze(1)
        slots_R = block_R * self.block_size + positions_R % self.block_size
        context = torch.arange(tables_RM.shape[1] * self.block_size)
        mask_R11C = (context <= positions_R.unsqueeze(1)).view(len(positions_R), 1, 1, -1)
        return PagedStep(self, slots_R, tables_RM, mask_R11C, None)

    def prefill_step(self, tables: list[list[int]], starts: list[int], ends: list[int]) -> PagedStep:
        """Positions `starts[i]` to `ends[i] - 1` of sequences, laid end to end."""
        blocks = max(-(-end // self.block_size) for end in ends)
        tables_RM = torch.full((len(tables), blocks), self.padding_block, dtype=torch.int64)
        for row, (table, end) in enumerate(zip(tables, ends, strict=True)):
            used = -(-end // self.block_size)
            tables_RM[row, :used] = torch.tensor(table[:used])
        slots_T = np.concatenate([self.slots_of(*each) for each in zip(tables, starts, ends, strict=True)])
        lengths = np.subtract(ends, starts)
        queries = int(lengths.max())
        positions_RQ = torch.tensor(starts).unsqueeze(1) + torch.arange(queries)
        mask_R1QC = torch.arange(blocks * self.block_size) <= positions_RQ.unsqueeze(2)
        first_token = np.cumsum(lengths) - lengths
        offsets = np.arange(queries)
        token_of_query = np.where(offsets < lengths[:, None], first_token[:, None] + offsets, 0).reshape(-1)
        query_of_token = (offsets < lengths[:, None]).reshape(-1).nonzero()[0]
        spread = Spread(queries, torch.from_numpy(token_of_query), torch.from_numpy(query_of_token))
        return PagedStep(self, torch.from_numpy(slots_T), tables_RM, mask_R1QC.unsqueeze(1), spread)


@dataclass(frozen=True)
class Spread:
    """How packed queries of a prefill lie in the padded batch `[R, queries]`."""

    queries: int
    token_of_query: Tensor
    query_of_token: Tensor


class PagedStep:
    """Where the tokens of one forward pass write and what they read; the model's context."""

    def __init__(self, pool: KvPool, slots_T: Tensor, tables_RM: Tensor, mask: Tensor, spread: Spread | None) -> None:
        self.pool = pool
        self.slots_T = slots_T
        self._write_rows = torch.cat((slots_T, slots_T + pool.slots))
        read_blocks = tables_RM.reshape(-1)
        self._read_rows = torch.cat((read_blocks, read_blocks + pool.total_blocks))
        self._context = pool.context_buffer(self._read_rows.numel())
        self._sequences = tables_RM.shape[0]
        self._mask = mask
        self._spread = spread

    def attend(self, layer: int, q_1TNH: Tensor, k_1TGH: Tensor, v_1TGH: Tensor, scale: float | None) -> Tensor:
        """Write the new keys and values, then attend over each sequence's blocks."""
        pool, sizes = self.pool, self.pool.sizes
        new = torch.cat((k_1TGH[0], v_1TGH[0])).flatten(1)
        pool.layer_slots[layer].index_copy_(0, self._write_rows, new)
        context = torch.index_select(pool.layer_blocks[layer], 0, self._read_rows, out=self._context)
        k_RGCH, v_RGCH = context.view(2, self._sequences, -1, sizes.n_kv_heads, sizes.head_dim).transpose(2, 3)
        group = sizes.n_heads // sizes.n_kv_heads
        # Query heads that share a KV head take the place of queries: nothing is repeated.
        if self._spread is None:
            q_RGQH = q_1TNH.view(self._sequences, sizes.n_kv_heads, group, sizes.head_dim)
            out = F.scaled_dot_product_attention(q_RGQH, k_RGCH, v_RGCH, attn_mask=self._mask, scale=scale)
            return out.reshape(q_1TNH.shape)
        spread = self._spread
        q = q_1TNH[0].index_select(0, spread.token_of_query)
        q = q.view(self._sequences, spread.queries, sizes.n_kv_heads, group, sizes.head_dim)
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = self._mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(q, k_RGCH, v_RGCH, attn_mask=mask, scale=scale)
        out = out.unflatten(2, (group, spread.queries)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        return out.index_select(0, spread.query_of_token).reshape(q_1TNH.shape)
