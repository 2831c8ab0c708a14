"""Train a ResNet on CIFAR-10: accuracy. Cuts are after its groups, as in the paper.

To fine-tune, the model is first trained without compression on other images and kept in a file.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from launch.reproduce.presets import VisionSize
from launch.reproduce.task import STAGES, Batch, existing, generator, weights_file

CLASSES, SIDE, MARGIN = 10, 32, 4  # of an image: pixels, and pixels that a crop may be off


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut and a final ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if changes
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ChannelsLast(nn.Module):
    """Convert to the memory format that convolutions are fast in."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


def resnet(size: VisionSize) -> list[nn.Module]:
    """Return four stages: stem and first group, two groups, last group and classifier."""
    stem = nn.Conv2d(3, size.width, 3, size.stem_stride, 1, bias=False)
    stages = [[stem, nn.BatchNorm2d(size.width), nn.ReLU()], *([] for _ in range(STAGES - 1))]
    inputs = size.width
    for group, stage in enumerate(stages):
        outputs = size.width * 2**group
        for block in range(size.blocks):
            stage.append(Block(inputs, outputs, 2 if group and not block else 1))
            inputs = outputs
    stages[-1] += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return [nn.Sequential(ChannelsLast(), *stage) for stage in stages]


class Vision:
    metric = "accuracy"
    gradient_clipping = 0.0

    def __init__(self, size: VisionSize, data: Path, cache: Path):
        """`data`: folder with cifar10/{train,test}.parquet; `cache`: where a pretrained model is kept."""
        self.size, self._data, self._cache = size, data, cache
        self._images, self._labels = read_images(data / "cifar10" / "train.parquet", size.train_images)
        self._std, self._mean = torch.std_mean(self._images / 255, dim=(0, 2, 3), keepdim=True)
        self._test = read_images(data / "cifar10" / "test.parquet", size.test_images)
        self.epochs = size.epochs
        self.steps_per_epoch = len(self._images) // size.batch

    def prepare(self) -> None:
        """Pretrain the model that every run starts from, if there is one."""
        if self.size.pretrain_images:
            self._weights()

    def _weights(self) -> Path:
        size = self.size
        numbers = (size.width, size.blocks, size.pretrain_images, size.pretrain_epochs)
        name = f"resnet-{'-'.join(map(str, numbers))}.safetensors"
        return weights_file(self._cache / name, self._pretrain)

    def _pretrain(self) -> nn.Module:
        size = self.size
        file = self._data / "cifar10" / "train.parquet"
        images, labels = read_images(file, size.pretrain_images, size.train_images)
        torch.manual_seed(0)
        model = nn.Sequential(*resnet(size)).train()
        optimizer = self.optimizer(model.parameters())
        steps = size.pretrain_epochs * (len(images) // size.batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for number in range(size.pretrain_epochs):
            for inputs, expected, _ in self._batches(images, labels, generator(0, number)):
                self.loss(model(inputs), expected).backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return model

    def stages(self, seed: int) -> list[nn.Module]:
        torch.manual_seed(seed)
        stages = resnet(self.size)
        if self.size.pretrain_images:
            nn.Sequential(*stages).load_state_dict(load_file(self._weights()), strict=True)
        return stages

    def epoch(self, seed: int, number: int) -> Iterator[Batch]:
        return self._batches(self._images, self._labels, generator(seed, number))

    def _batches(self, images: Tensor, labels: Tensor, drawing: torch.Generator) -> Iterator[Batch]:
        order, batch = torch.randperm(len(images), generator=drawing), self.size.batch
        for index in order[: len(images) // batch * batch].split(batch):
            yield self._normalised(augmented(images[index], drawing)), labels[index], index

    def _normalised(self, images: Tensor) -> Tensor:
        return (images / 255 - self._mean) / self._std

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output, labels)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        size = self.size
        return torch.optim.SGD(parameters, size.lr, size.momentum, weight_decay=size.weight_decay)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        steps = self.size.cosine_epochs * self.steps_per_epoch
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Return the accuracy on test images, in percent."""
        images, labels = (tensor.split(self.size.batch) for tensor in self._test)
        hits = 0
        for some, expected in zip(images, labels):
            hits += (model(self._normalised(some).to(device)).argmax(1).cpu() == expected).sum().item()
        return {"accuracy": 100 * hits / len(self._test[1])}


def augmented(images: Tensor, drawing: torch.Generator) -> Tensor:
    """Shift each image by up to 4 pixels, with black borders, and mirror it at random."""
    count = len(images)
    padded = F.pad(images, (MARGIN,) * 4)
    rows, columns = torch.randint(2 * MARGIN + 1, (2, count, 1), generator=drawing) + torch.arange(SIDE)
    mirrored = torch.rand(count, 1, generator=drawing) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )


def read_images(file: Path, count: int, skipped: int = 0) -> tuple[Tensor, Tensor]:
    """Read images of a parquet file, uint8 [count, 3, 32, 32], and labels, int64 [count]."""
    table = pyarrow.parquet.read_table(existing(file, "parquet file of CIFAR-10")).slice(skipped, count)
    if len(table) < count:
        raise SystemExit(f"reproduce: {file}: {len(table)} images, the preset needs {count}")
    files = (io.BytesIO(image["bytes"]) for image in table["img"].to_pylist())
    decoded = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    images = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(table["label"].to_pylist())
