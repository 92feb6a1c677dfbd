import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator()
images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split((images / 16).astype("float32"), labels, random_state=0)
train = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), 32, shuffle=True)
test = DataLoader(TensorDataset(torch.tensor(x_test), torch.tensor(y_test)), 32)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
adam = torch.optim.Adam(net.parameters(), 1e-3)
net, adam, train, test = accelerator.prepare(net, adam, train, test)
for epoch in range(10):
    net.train()
    for batch, targets in train:
        adam.zero_grad()
        loss = cross_entropy(net(batch), targets)
        accelerator.backward(loss)
        adam.step()
    net.eval()
    hits = []
    with torch.no_grad():
        for batch, targets in test:
            logits, targets = accelerator.gather_for_metrics((net(batch), targets))
            hits.append((logits.argmax(1) == targets).float())
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}, val_accuracy {torch.cat(hits).mean():.4f}")
