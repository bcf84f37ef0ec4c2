"""Train a small CNN with Hugging Face's Trainer: torchrun --nproc-per-node 2 with_trainer.py."""

import argparse
import os

import torch
import torch.nn.functional as F
from images import Images, Net
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Examples(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, label = self.images[i]
        return {"pixels": image, "labels": label}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, pixels, labels=None):
        return {"logits": self.net(pixels)}


def mean_loss(outputs, labels, num_items_in_batch):
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def count_correct(prediction):
    labels = prediction.label_ids
    return {"correct": int((prediction.predictions.argmax(1) == labels).sum()), "count": len(labels)}


class PrintLogs(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            print(f"loss {logs['loss']:.17g}", flush=True)
        if "eval_count" in logs:
            print(f"accuracy ({logs['eval_correct']} of {logs['eval_count']})", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default="out")
    args = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size // world_size,
        per_device_eval_batch_size=100,
        learning_rate=args.lr,
        weight_decay=0.05,
        eval_strategy="epoch",
        save_steps=20,
        logging_steps=1,
        disable_tqdm=True,
        label_names=["labels"],
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        Model().to(dtype),
        arguments,
        train_dataset=Examples(Images(1000, 1, True, dtype)),
        eval_dataset=Examples(Images(999, 2, False, dtype)),
        compute_loss_func=mean_loss,
        compute_metrics=count_correct,
        callbacks=[PrintLogs],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if os.path.isdir(args.out) else None)
    if trainer.is_world_process_zero():
        torch.save(trainer.model.net.state_dict(), os.path.join(args.out, "model.pt"))


if __name__ == "__main__":
    main()
