import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(images / 16, labels, random_state=0)
layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
model = keras.Sequential([keras.Input((64,)), *layers])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
tfdist.fit(model, x, y, validation_data=(x_test, y_test), epochs=10, batch_size=32, run_dir="runs/fit")
