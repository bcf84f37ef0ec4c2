"""Train LeNet on MNIST on several ranks, which `fleetrun` starts."""

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.vision.transforms import ToTensor
from samestep.data.datasets import EMBEDDED  # 5,000 images; without file names, Paddle downloads all 70,000

FILES = f"{EMBEDDED}/train-images-idx3-ubyte.gz", f"{EMBEDDED}/train-labels-idx1-ubyte.gz"
train_dataset = paddle.vision.datasets.MNIST(*FILES, mode="train", transform=ToTensor())


def use_another_store() -> None:
    """Create a new store, so that fleet's gloo group does not read the first group's addresses (Paddle 3.3.1)."""
    dist.init_parallel_env()
    host, port = dist.ParallelEnv().trainer_endpoints[0].split(":")
    store = paddle.base.core.TCPStore(host, int(port), dist.get_rank() == 0, dist.get_world_size())
    dist.collective._set_default_store(store)


def train() -> None:
    """Train for one epoch."""
    if not paddle.is_compiled_with_cuda() and dist.get_world_size() > 1:
        use_another_store()
    fleet.init(is_collective=True)
    paddle.seed(1)
    # The sampler shuffles equally on all ranks, and gives each rank a different part of every global batch.
    sampler = paddle.io.DistributedBatchSampler(train_dataset, batch_size=64 // dist.get_world_size(), shuffle=True)
    train_loader = paddle.io.DataLoader(train_dataset, batch_sampler=sampler)
    net = paddle.vision.models.LeNet()
    adam = paddle.optimizer.Adam(learning_rate=0.001, parameters=net.parameters())
    if dist.get_world_size() > 1:  # Paddle 3.3.1 cannot wrap the model of a single rank
        net, adam = fleet.distributed_model(net), fleet.distributed_optimizer(adam)
    for step, (images, labels) in enumerate(train_loader, 1):
        scores = net(images)
        loss = F.cross_entropy(scores, labels)
        loss.backward()
        if step % 20 == 0:
            top1, top2 = (paddle.metric.accuracy(scores, labels, k).item() for k in (1, 2))
            print(f"step {step} - loss: {loss.item():.4f} - acc_top1: {top1:.4f} - acc_top2: {top2:.4f}")
        adam.step()
        adam.clear_grad()


if __name__ == "__main__":
    train()
