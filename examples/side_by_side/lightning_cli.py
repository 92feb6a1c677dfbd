import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Data(lightning.LightningDataModule):
    def __init__(self, batch_size: int):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        x, x_test, y, y_test = train_test_split((images / 16).astype("float32"), labels, random_state=0)
        self.train = TensorDataset(torch.tensor(x), torch.tensor(y))
        self.test = TensorDataset(torch.tensor(x_test), torch.tensor(y_test))

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.test, self.batch_size)


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, number):
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", cross_entropy(logits, y), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


LightningCLI(Digits, Data)
