"""Fine-tunes a transformer of the transformers library on the device flagos, compiled by flagos.

    pip install flagos 'transformers>=5.2,<6'
    python finetune_torch.py

The model's weights are random here, so that the example needs no network: with the `from_pretrained` of
`AutoModelForSequenceClassification` it is the same program.
"""

from __future__ import annotations

import torch
import transformers

torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=2
)
model = transformers.BertForSequenceClassification(config).to("flagos")
compiled = torch.compile(model, backend="flagos")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences of 16 tokens, [count, 16], and whether one of them is token 7."""
    tokens = torch.randint(8, 64, (count, 16))
    labels = torch.randint(0, 2, (count,))
    places = torch.randint(0, 16, (count, 1))
    return tokens.scatter(1, places, torch.where(labels == 1, 7, 8)[:, None]).to("flagos"), labels.to("flagos")


for number in range(81):
    tokens, labels = batch(64)
    loss = compiled(input_ids=tokens, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number % 20 == 0:
        print(f"step {number:3}: loss {loss.item():.3f} on {loss.device}")

model.eval()
with torch.no_grad():
    tokens, labels = batch(256)
    right = (compiled(input_ids=tokens).logits.argmax(dim=1) == labels).float().mean().item()
print(f"{right:.1%} of new sentences are classified right")
assert right > 0.95
