"""Train a small CNN with Accelerate: torchrun --nproc-per-node 2 with_accelerate.py."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from images import Images, Net
from torch.utils.data import DataLoader


def evaluate(accelerator, model, loader):
    model.eval()
    correct = count = 0
    for x, y in loader:
        with torch.no_grad():
            predicted = model(x).argmax(1)
        predicted, y = accelerator.gather_for_metrics((predicted, y))
        correct += (predicted == y).sum().item()
        count += len(y)
    model.train()
    return correct, count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default="out")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    os.makedirs(args.out, exist_ok=True)
    dtype = getattr(torch, args.dtype)
    train_set, test_set = Images(1000, 1, True, dtype), Images(999, 2, False, dtype)
    per_rank = args.batch_size // accelerator.num_processes
    loader = accelerator.prepare(DataLoader(train_set, per_rank, shuffle=True))
    test_loader = accelerator.prepare(DataLoader(test_set, 100))
    model = Net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)

    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            accelerator.print(f"loss {loss.item():.17g}", flush=True)
        correct, count = evaluate(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch} accuracy {correct / count:.4f} ({correct} of {count})", flush=True)
    accelerator.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.out, "model.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
