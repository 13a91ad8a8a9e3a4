"""Decoding with a static cache: the layers of a model as few launches, and one CUDA graph a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from triton_kernel_lab.integrations.transformers._layers import Layer, expect_known, layer_of, norm_of, projection_of
from triton_kernel_lab.integrations.transformers._rotate import Cache, rotate_and_store, slots
from triton_kernel_lab.ops import _checks
from triton_kernel_lab.ops.add_rms_norm import add_rms_norm
from triton_kernel_lab.ops.flash_attention import flash_attention
from triton_kernel_lab.ops.rms_norm import rms_norm
from triton_kernel_lab.ops.selected_attention import selected_attention, selected_attention_paged

__all__ = ["Decoder"]

NAME = "Decoder"
# A graph serves sequences of up to so many rows of the cache, the next one twice as many, and so on.
_LEAST_ROWS = 512


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let a capture take the scratch memory of cuBLAS from its graph's own pool.

    cuBLAS keeps it a stream, and all captures run on one: a graph would go on writing to memory of
    an earlier decoder's pool, which is freed with that decoder.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Decoder:
    """A causal language model with a static cache, decoded in as few launches as its layers allow.

    The layers run as kernels of this package, and as cuBLAS where a batch is multiplied by dense
    weights: norms fused with the residual sum, one projection for queries, keys and values,
    positions and the write to the cache in one launch, attention over the cache, and the gated
    projection in one launch. On CUDA a step is one graph, captured at the first step of each range
    of lengths (512 rows of the cache, then twice as many, and so on) and replayed from then on;
    nothing waits for the device. Elsewhere a step runs eagerly.

    Args:
        model: a model of the Llama, Mistral, Qwen2 or Qwen3 family with a head, patched or not, whose
            floating-point weights have one dtype. INT4 layers stay what ``patch`` made them. The
            weights of queries, keys and values are copied into one, the others are used where they
            lie: a change of weights needs a new decoder.
        batch: B, the sequences that are decoded together.
        max_length: the most tokens of a sequence, prompt and answer.
        paged: whether the cache is kept in pages, found through ``page_table``.
        page_size: rows of a page.

    Attributes:
        page_table: int32 [B, ceil(max_length / page_size)], or None without pages. Before a prompt it
            may be written to: any numbers of pages that occur once.

    Raises:
        ValueError: a layer is not known to compute what the decoder does, batch, max_length or
            page_size is not positive, or max_length exceeds a sliding window.
    """

    def __init__(
        self, model: nn.Module, batch: int, max_length: int, *, paged: bool = False, page_size: int = 16
    ) -> None:
        for argument, value in (("batch", batch), ("max_length", max_length), ("page_size", page_size)):
            _checks.expect(isinstance(value, int) and value > 0, NAME, argument, "a positive integer", value)
        expect_known(model, max_length)
        whole: Any = model
        base = whole.model
        weight = base.embed_tokens.weight
        self.batch, self.max_length, self.page_size = batch, max_length, page_size
        self.device, self.dtype = weight.device, weight.dtype
        self.page_table: torch.Tensor | None = None
        pages = -(-max_length // page_size)
        if paged:
            order = torch.arange(batch * pages, dtype=torch.int32, device=self.device)
            self.page_table = order.view(pages, batch).t().contiguous()
        self._embed, self._head = base.embed_tokens, projection_of(whole.lm_head)
        self._final = norm_of(base.norm)
        first = base.layers[0].self_attn
        kv_heads = first.k_proj.out_features // first.head_dim
        rows = (batch * pages, page_size) if paged else (batch, max_length)
        shape = (*rows, kv_heads, first.head_dim)
        self._cos, self._sin = self._angles(base.rotary_emb, first.head_dim)
        self._layers = [layer_of(block, self._cache(shape)) for block in base.layers]
        self._rows = torch.arange(max_length, dtype=torch.int32, device=self.device)
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._positions = torch.zeros(batch, 1, dtype=torch.int32, device=self.device)
        self._graphs: dict[int, tuple[Any, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._length = 0

    def _cache(self, shape: tuple[int, ...]) -> Cache:
        k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        return Cache(k, v, self.page_table)

    def _angles(self, rotary: Any, d: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [max_length, D / 2]: each serves both halves of a head."""
        example = torch.empty(1, dtype=self.dtype, device=self.device)
        positions = torch.arange(self.max_length, device=self.device)[None]
        with torch.no_grad():
            both = [table[0] for table in rotary(example, position_ids=positions)]
        whole = all(table.shape[1] == d for table in both)
        _checks.expect(whole, NAME, "model", f"rotary positions for all {d} features", both[0].shape[1])
        cos, sin = (table[:, : d // 2].contiguous() for table in both)
        return cos, sin

    @property
    def length(self) -> int:
        """The tokens of the longest sequence so far; 0 before the first prompt."""
        return self._length

    def prefill(self, input_ids: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Forget all sequences and read a prompt of each.

        Args:
            input_ids: integers [B, L] on the model's device, L from 1 to max_length.
            lengths: int [B], the tokens that count of each row, from 1 to L; the rest is
                padding on the right. None for L each.

        Returns:
            The logits [B, vocabulary] after the last token of each sequence.

        Raises:
            ValueError: the shapes do not fit, or a length is out of range.
        """
        fits = input_ids.ndim == 2 and input_ids.shape[0] == self.batch and 1 <= input_ids.shape[1] <= self.max_length
        shape = f"[{self.batch}, L] with L from 1 to {self.max_length}"
        _checks.expect(fits, f"{NAME}.prefill", "input_ids", shape, tuple(input_ids.shape))
        tokens = input_ids.shape[1]
        if lengths is None:
            lengths = torch.full((self.batch,), tokens, device=self.device)
        fits = lengths.shape == (self.batch,) and all(1 <= each <= tokens for each in lengths.tolist())
        _checks.expect(fits, f"{NAME}.prefill", "lengths", f"{self.batch} numbers from 1 to {tokens}", lengths)
        lengths = lengths.to(self.device)
        positions = self._rows[:tokens].expand(self.batch, -1).contiguous()
        with torch.no_grad():
            normed = self._hidden(input_ids, lambda layer, qkv: self._attend_prompt(layer, qkv, positions))
            self._positions.copy_(lengths[:, None])
            self._length = tokens
            return self._head(normed[torch.arange(self.batch, device=self.device), lengths - 1])

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Append a token to each sequence.

        Args:
            token_ids: integers [B], on the model's device.

        Returns:
            The logits [B, vocabulary] after it. On CUDA the next step or prompt overwrites them.

        Raises:
            ValueError: the shape does not fit, there was no prompt, or the cache is full.
        """
        name = f"{NAME}.step"
        shape = tuple(token_ids.shape)
        _checks.expect(shape == (self.batch,), name, "token_ids", f"the shape ({self.batch},)", shape)
        ready = 0 < self._length < self.max_length
        _checks.expect(ready, name, "token_ids", f"a prompt before, and at most {self.max_length} tokens", self._length)
        rows = self._bucket(self._length + 1)
        self._tokens.copy_(token_ids[:, None])
        with torch.no_grad():
            if self._pool is None:
                logits = self._logits(rows)
                self._positions += 1
            else:
                with torch.cuda.device(self.device):
                    graph, logits = self._graphs.get(rows) or self._capture(rows)
                    graph.replay()
        self._length += 1
        return logits

    def generate(self, input_ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The likeliest tokens one after the other, int64 [B, new_tokens]; no token ends a sequence.

        Args:
            input_ids: the prompts, as for ``prefill``.
            new_tokens: how many, 1 or more; with the prompt at most max_length + 1.

        Raises:
            ValueError: as ``prefill`` and ``step``.
        """
        _checks.expect(new_tokens >= 1, f"{NAME}.generate", "new_tokens", "1 or more", new_tokens)
        answer = torch.empty(self.batch, new_tokens, dtype=torch.int64, device=self.device)
        answer[:, 0] = self.prefill(input_ids).argmax(-1)
        for at in range(1, new_tokens):
            answer[:, at] = self.step(answer[:, at - 1]).argmax(-1)
        return answer

    def _bucket(self, length: int) -> int:
        """The rows of the cache that the graph for a length looks at."""
        return min(max(_LEAST_ROWS, 1 << (length - 1).bit_length()), self.max_length)

    def _capture(self, rows: int) -> tuple[Any, torch.Tensor]:
        """Record one step over so many rows of the cache."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Compiles what the graph launches. It writes the row of the cache that the step will write again.
            self._logits(rows)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _own_workspaces(), torch.cuda.graph(graph, pool=self._pool):
            logits = self._logits(rows)
            self._positions += 1
        self._graphs[rows] = graph, logits
        return graph, logits

    def _logits(self, rows: int) -> torch.Tensor:
        """The logits [B, vocabulary] of the tokens at hand, which see up to ``rows`` rows of the cache."""
        indices = self._seen(rows)
        normed = self._hidden(self._tokens, lambda layer, qkv: self._attend_cache(layer, qkv, indices))
        return self._head(normed[:, 0])

    def _seen(self, rows: int) -> torch.Tensor:
        """The rows of the cache up to each sequence's position, int32 [B, rows] from the last to the first.

        What comes after the first is negative and so no choice: one launch, where a comparison would take three.
        """
        return self._positions - self._rows[:rows]

    def _hidden(self, tokens: torch.Tensor, attend: Callable[[Layer, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What the head multiplies, [B, T, hidden], for tokens [B, T]."""
        residual = self._embed(tokens)
        normed = rms_norm(residual, *self._layers[0].norm)
        following = [*(layer.norm for layer in self._layers[1:]), self._final]
        for layer, norm in zip(self._layers, following, strict=True):
            seen = attend(layer, layer.qkv(normed)).flatten(2)
            normed, residual = add_rms_norm(layer.out(seen), residual, *layer.mlp_norm)
            normed, residual = add_rms_norm(layer.down(layer.gated(normed)), residual, *norm)
        return normed

    def _attend_cache(self, layer: Layer, qkv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Attention [B, 1, Hq, D] of one token a sequence over the cache, to which it is added."""
        q = rotate_and_store(qkv, self._cos, self._sin, self._positions, layer.cache, layer.heads)[:, 0]
        k, v, table = layer.cache
        if table is not None:
            return selected_attention_paged(q, k, v, table, indices, layer.scale)[:, None]
        rows = indices.shape[1]
        return selected_attention(q, k[:, :rows], v[:, :rows], indices, layer.scale)[:, None]

    def _attend_prompt(self, layer: Layer, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attention [B, L, Hq, D] of the prompts among themselves; fills the cache."""
        tokens = qkv.shape[1]
        target = layer.cache
        if target.table is not None:
            # The kernel for prompts reads no pages.
            shape = (self.batch, tokens, *target.k.shape[2:])
            target = Cache(qkv.new_empty(shape), qkv.new_empty(shape), None)
        q = rotate_and_store(qkv, self._cos, self._sin, positions, target, layer.heads)
        k, v = target.k[:, :tokens], target.v[:, :tokens]
        if layer.cache.table is not None:
            at = slots(layer.cache.table, positions, self.page_size)
            layer.cache.k.flatten(0, 1)[at], layer.cache.v.flatten(0, 1)[at] = k, v
        return flash_attention(q, k, v, causal=True, scale=layer.scale)
