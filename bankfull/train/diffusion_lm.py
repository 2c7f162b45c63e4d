"""Diffusion-LM (continuous diffusion of text) as a reference, on tiny models: embeddings are noised, a network predicts
the clean embeddings, and the sampler rounds them to tokens.

Not served by the engine: it denoises a text of fixed length in a few hundred passes and has nothing to cache. It is
here so that the discrete samplers can be compared with it.

- Noise: x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e, with the square-root schedule a_t = 1 - sqrt(t / T + s).
- Training: the network predicts x_0 from x_t; embeddings are learned with it, and the cross entropy of rounding keeps
  them apart.
- Sampling: from pure noise down to t = 0. With clamping, each predicted x_0 is replaced by the nearest embedding, which
  makes the network commit to tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCHEDULE_OFFSET = 1e-4


@dataclass(frozen=True, slots=True)
class DiffusionLMShape:
    vocab: int
    length: int
    size: int = 16
    """Dimensions of an embedding."""
    hidden: int = 256
    layers: int = 3
    noise_steps: int = 200


class DiffusionLM(nn.Module):
    """The network reads a whole text at once: all positions in both directions."""

    kept: Tensor

    def __init__(self, shape: DiffusionLMShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.size)
        inner = shape.length * shape.size
        self.time = nn.Embedding(shape.noise_steps + 1, shape.hidden)
        self.enter = nn.Linear(inner, shape.hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(shape.hidden),
                nn.Linear(shape.hidden, shape.hidden),
                nn.SiLU(),
                nn.Linear(shape.hidden, shape.hidden),
            )
            for _ in range(shape.layers)
        )
        self.leave = nn.Linear(shape.hidden, inner)
        turns = torch.arange(shape.noise_steps + 1) / shape.noise_steps
        self.register_buffer("kept", (1 - (turns + SCHEDULE_OFFSET).sqrt()).clamp(1e-4, 1 - 1e-4))

    def clean(self, noisy: Tensor, turn: Tensor) -> Tensor:
        """The predicted embeddings x_0 (texts, length, size) from x_t, at the noise steps `turn` (texts)."""
        x = self.enter(noisy.flatten(1)) + self.time(turn)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x).view_as(noisy)

    def rounding(self, clean: Tensor) -> Tensor:
        """Logits of the tokens: the negative squared distance to each embedding."""
        table = self.embedding.weight
        return 2 * clean @ table.T - table.square().sum(-1)

    def loss(self, tokens: Tensor, random: torch.Generator) -> Tensor:
        x0 = self.embedding(tokens)
        turn = torch.randint(1, self.shape.noise_steps + 1, (len(tokens),), generator=random)
        kept = self.kept[turn].view(-1, 1, 1)
        noise = torch.randn(x0.shape, generator=random)
        estimate = self.clean(kept.sqrt() * x0 + (1 - kept).sqrt() * noise, turn)
        rounding = F.cross_entropy(self.rounding(estimate).flatten(0, 1), tokens.flatten())
        return (estimate - x0).square().mean() + rounding

    @torch.inference_mode()
    def sample(self, count: int, *, clamp: bool = True, seed: int = 0) -> Tensor:
        """Token ids (count, length)."""
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(count, self.shape.length, self.shape.size, generator=random)
        for turn in range(self.shape.noise_steps, 0, -1):
            x0 = self.clean(x, torch.full((count,), turn))
            if clamp:
                x0 = self.embedding(self.rounding(x0).argmax(-1))
            now, then = self.kept[turn], self.kept[turn - 1]
            # The posterior of x_{t-1} given x_t and x_0.
            step = now / then
            mean = (then.sqrt() * (1 - step) * x0 + step.sqrt() * (1 - then) * x) / (1 - now)
            spread = ((1 - then) / (1 - now) * (1 - step)).sqrt()
            x = mean + (spread * torch.randn(x.shape, generator=random) if turn > 1 else 0)
        return self.rounding(x).argmax(-1)


def train_diffusion_lm(
    shape: DiffusionLMShape,
    texts: Callable[[int], Tensor],
    *,
    steps: int,
    batch: int = 128,
    rate: float = 2e-3,
    seed: int = 0,
) -> DiffusionLM:
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    model = DiffusionLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        loss = model.loss(texts(batch), random)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.train(False)
