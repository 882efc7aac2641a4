"""Networks for text, sound, time series and recommendations, and with attention, narrow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ece408_op.operator.loading import load_mxnet

from .emulated_networks import network

mx = load_mxnet()
sym, nn = mx.sym, mx.gluon.nn
_draw = np.random.default_rng(408)


class _Block(mx.gluon.HybridBlock):  # type: ignore[name-defined]
    pass


def _words(limit: int, *shape: int) -> Any:
    return _draw.integers(0, limit, shape).astype(np.float32)


def _dense(x: Any, units: int, act: str | None = None, **options: Any) -> Any:
    x = sym.FullyConnected(x, num_hidden=units, **options)
    return sym.Activation(x, act_type=act) if act else x


# Text.


@network("Text CNN", data=_words(60, 3, 20))
def text_cnn() -> Any:
    x = sym.Embedding(sym.Variable("data"), input_dim=60, output_dim=16)
    x = sym.Reshape(x, shape=(-1, 1, 20, 16))
    pooled = []
    for width in (3, 4, 5):
        y = sym.Convolution(x, kernel=(width, 16), num_filter=12)
        y = sym.Activation(y, act_type="relu")
        pooled.append(sym.Pooling(y, pool_type="max", kernel=(20 - width + 1, 1), stride=(1, 1)))
    x = sym.Reshape(sym.Concat(*pooled, dim=1), shape=(-1, 36))
    return sym.SoftmaxOutput(_dense(sym.Dropout(x, p=0.5), 2), name="softmax")


@network("Text CNN, one dimension", data=_words(60, 3, 20))
def text_cnn_1d() -> Any:
    class Net(_Block):
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                self.words, self.fixed = nn.Embedding(60, 12), nn.Embedding(60, 12)
                self.convs, self.pool = nn.HybridSequential(), nn.GlobalMaxPool1D()
                for width in (3, 4, 5):
                    self.convs.add(nn.Conv1D(10, width, activation="relu"))
                self.classes = nn.Dense(2)

        def hybrid_forward(self, F: Any, words: Any) -> Any:
            x = F.concat(self.words(words), self.fixed(words), dim=2).transpose((0, 2, 1))
            found = [F.flatten(self.pool(conv(x))) for conv in self.convs]
            return self.classes(F.concat(*found, dim=1))

    return Net()


def _attention(F: Any, query: Any, key: Any, value: Any, heads: int, size: int, mask: Any) -> Any:
    def split(x: Any) -> Any:
        x = F.transpose(F.reshape(x, shape=(0, 0, heads, -1)), axes=(0, 2, 1, 3))
        return F.reshape(x, shape=(-1, 0, 0), reverse=True)

    scores = F.batch_dot(split(query), split(key), transpose_b=True) / math.sqrt(size)
    if mask is not None:
        scores = F.broadcast_add(scores, mask)
    x = F.batch_dot(F.softmax(scores), split(value))
    x = F.transpose(F.reshape(x, shape=(-1, heads, 0, 0), reverse=True), axes=(0, 2, 1, 3))
    return F.reshape(x, shape=(0, 0, -3))


class _Layer(_Block):
    """A layer of a transformer, `across` with attention to the encoder's result as well."""

    def __init__(self, units: int, heads: int, across: bool) -> None:
        super().__init__()
        self._heads, self._size, self._across = heads, units // heads, across
        with self.name_scope():
            for name in ("q", "k", "v", "o", "q2", "k2", "v2", "o2")[: 8 if across else 4]:
                setattr(self, name, nn.Dense(units, flatten=False, use_bias=False))
            self.wide = nn.Dense(2 * units, activation="relu", flatten=False)
            self.narrow = nn.Dense(units, flatten=False)
            self.norms = nn.HybridSequential()
            self.norms.add(*[nn.LayerNorm() for _ in range(3 if across else 2)])

    def hybrid_forward(self, F: Any, x: Any, memory: Any = None, mask: Any = None) -> Any:
        sizes = self._heads, self._size
        y = _attention(F, self.q(x), self.k(x), self.v(x), *sizes, mask)
        x = self.norms[0](x + self.o(y))
        if self._across:
            y = _attention(F, self.q2(x), self.k2(memory), self.v2(memory), *sizes, None)
            x = self.norms[2](x + self.o2(y))
        return self.norms[1](x + self.narrow(self.wide(x)))


@network("Transformer", source=_words(50, 2, 9), target=_words(50, 2, 7))
def transformer() -> Any:
    class Net(_Block):
        def __init__(self) -> None:
            super().__init__()
            place = np.arange(9)[:, None] / 10000 ** (np.arange(24)[None] / 24)
            places = np.concatenate([np.sin(place[:, ::2]), np.cos(place[:, ::2])], 1)
            mask = np.triu(np.full((1, 7, 7), -1e9), 1)
            with self.name_scope():
                self.words, self.decoded = nn.Embedding(50, 24), nn.Dense(50, flatten=False)
                self.encoder, self.decoder = nn.HybridSequential(), nn.HybridSequential()
                for _ in range(2):
                    self.encoder.add(_Layer(24, 4, False))
                    self.decoder.add(_Layer(24, 4, True))
                self.places = self.params.get_constant("places", places[None])
                self.mask = self.params.get_constant("mask", mask)

        def hybrid_forward(self, F: Any, source: Any, target: Any, places: Any, mask: Any) -> Any:
            x = F.broadcast_add(self.words(source) * math.sqrt(24), places)
            memory = self.encoder(x)
            places = F.slice_axis(places, axis=1, begin=0, end=7)
            y = F.broadcast_add(self.words(target) * math.sqrt(24), places)
            for layer in self.decoder:
                y = layer(y, memory, mask)
            return self.decoded(y)

    return Net()


@network("LSTM by cells, unrolled", data=_words(30, 2, 6))
def lstm_unrolled() -> Any:
    x = sym.Embedding(sym.Variable("data"), input_dim=30, output_dim=12)
    cell = mx.rnn.SequentialRNNCell()
    cell.add(mx.rnn.LSTMCell(16, prefix="first_"))
    cell.add(mx.rnn.GRUCell(16, prefix="second_"))
    starts = [sym.Variable(f"start{k}", shape=(2, 16)) for k in range(3)]
    outputs, _ = cell.unroll(6, inputs=x, begin_state=starts, merge_outputs=True)
    x = _dense(sym.Reshape(outputs, shape=(-1, 16)), 30)
    return sym.SoftmaxOutput(x, name="softmax")


@network("LSTM, fused", data=_words(30, 2, 6))
def lstm_fused() -> Any:
    x = sym.Embedding(sym.Variable("data"), input_dim=30, output_dim=12)
    start = [sym.Variable(f"start{k}", shape=(4, 2, 10)) for k in range(2)]
    x = sym.RNN(
        sym.SwapAxis(x, dim1=0, dim2=1),
        sym.Variable("rnn_weight"),
        *start,
        state_size=10,
        num_layers=2,
        bidirectional=True,
        mode="lstm",
    )
    return sym.softmax(_dense(sym.Reshape(x, shape=(-1, 20)), 30))


@network("CRNN", data=(2, 1, 32, 64))
def crnn() -> Any:
    class Net(_Block):
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                self.features = nn.HybridSequential()
                for filters, pool in ((8, (2, 2)), (12, (2, 2)), (16, (2, 1)), (16, (2, 1))):
                    self.features.add(nn.Conv2D(filters, 3, padding=1, use_bias=False))
                    self.features.add(nn.BatchNorm(), nn.Activation("relu"))
                    self.features.add(nn.MaxPool2D(pool, pool))
                self.features.add(nn.Conv2D(16, (2, 1), activation="relu"))
                self.lstm = mx.gluon.rnn.LSTM(12, num_layers=2, bidirectional=True)
                self.letters = nn.Dense(11, flatten=False)

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            x = F.squeeze(self.features(x), axis=2)
            return self.letters(self.lstm(F.transpose(x, axes=(2, 0, 1))))

    return Net()


# Sound and time.


@network("WaveNet", data=_words(32, 1, 40))
def wavenet() -> Any:
    def conv(x: Any, filters: int, width: int = 1, dilate: int = 1) -> Any:
        sizes = {"kernel": (1, width), "dilate": (1, dilate)}
        return sym.Convolution(x, num_filter=filters, **sizes)

    x = sym.one_hot(sym.Variable("data"), depth=32)
    x = conv(sym.expand_dims(sym.SwapAxis(x, dim1=1, dim2=2), axis=2), 16, 2)
    skips = []
    for dilate in (1, 2, 4, 1, 2, 4):
        gated = sym.tanh(conv(x, 16, 2, dilate)) * sym.sigmoid(conv(x, 16, 2, dilate))
        x = conv(gated, 16) + sym.slice_axis(x, axis=3, begin=dilate, end=None)
        skips.append(sym.slice_axis(conv(gated, 16), axis=3, begin=-25, end=None))
    x = conv(sym.relu(sym.add_n(*skips)), 16)
    return sym.softmax(conv(sym.relu(x), 32), axis=1)


@network("Speech, convolutions and recurrent layers", data=(1, 1, 40, 24))
def deep_speech() -> Any:
    x = sym.Variable("data")
    for filters in (8, 12):
        x = sym.Convolution(x, num_filter=filters, kernel=(5, 5), stride=(2, 2), pad=(2, 2))
        x = sym.clip(sym.BatchNorm(x, fix_gamma=False), a_min=0, a_max=20)
    x = sym.reshape(sym.transpose(x, axes=(2, 0, 1, 3)), shape=(0, 0, -3))
    start = sym.Variable("start", shape=(2, 1, 12))
    options = {"state_size": 12, "num_layers": 1, "bidirectional": True, "mode": "gru"}
    x = sym.RNN(x, sym.Variable("rnn_weight"), start, **options)
    return sym.softmax(_dense(x, 12, flatten=False))


# Recommendations.


@network("Neural collaborative filtering", user=_words(40, 6), item=_words(30, 6))
def neural_filtering() -> Any:
    user, item = sym.Variable("user"), sym.Variable("item")
    sides = ((user, 40), (item, 30))
    factors = [sym.Embedding(x, input_dim=count, output_dim=8) for x, count in sides]
    hidden = [sym.Embedding(x, input_dim=count, output_dim=12) for x, count in sides]
    x = sym.concat(*hidden, dim=1)
    for units in (24, 16, 8):
        x = _dense(x, units, "relu")
    x = _dense(sym.concat(factors[0] * factors[1], x, dim=1), 1)
    return sym.LogisticRegressionOutput(x, sym.Variable("label"), name="score")


@network("Wide and deep", wide=(4, 20), fields=_words(20, 4, 3), numbers=(4, 5))
def wide_and_deep() -> Any:
    wide, fields, numbers = map(sym.Variable, ("wide", "fields", "numbers"))
    parts = sym.split(fields, num_outputs=3, axis=1, squeeze_axis=True)
    found = [sym.Embedding(each, input_dim=20, output_dim=6) for each in parts]
    x = _dense(_dense(sym.concat(*found, numbers, dim=1), 24, "relu"), 12, "relu")
    score = sym.dot(wide, sym.Variable("wide_weight", shape=(20, 2))) + _dense(x, 2)
    return sym.SoftmaxOutput(score, name="softmax")


# Attention in images, and what moves pixels.


class _Gated(_Block):
    """A residual block whose channels, and with `places` whose pixels, are weighed."""

    def __init__(self, filters: int, places: bool) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Conv2D(filters, 3, padding=1, use_bias=False), nn.BatchNorm())
            self.body.add(nn.Activation("relu"), nn.Conv2D(filters, 3, padding=1), nn.BatchNorm())
            self.gate = nn.HybridSequential()
            self.gate.add(nn.Dense(filters // 4, activation="relu"), nn.Dense(filters))
            self.place = nn.Conv2D(1, 7, padding=3, use_bias=False) if places else None

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        y = self.body(x)
        gate = self.gate(F.contrib.AdaptiveAvgPooling2D(y, output_size=1))
        if self.place is not None:
            largest = F.Pooling(y, global_pool=True, pool_type="max", kernel=(1, 1))
            gate = gate + self.gate(largest)
        gate = F.sigmoid(gate).expand_dims(2).expand_dims(3)
        y = F.broadcast_mul(y, gate)
        if self.place is not None:
            both = F.mean(y, axis=1, keepdims=True), F.max(y, axis=1, keepdims=True)
            y = F.broadcast_mul(y, F.sigmoid(self.place(F.concat(*both, dim=1))))
        return F.relu(x + y)


def _gated(places: bool) -> Any:
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1, activation="relu"), _Gated(16, places))
    net.add(nn.MaxPool2D(), _Gated(16, places), nn.GlobalAvgPool2D(), nn.Dense(10))
    return net


@network("CBAM attention", data=(2, 3, 24, 24))
def cbam() -> Any:
    return _gated(places=True)


@network("Squeeze and excitation", data=(2, 3, 24, 24))
def squeeze_excitation() -> Any:
    return _gated(places=False)


@network("Non-local attention", data=(2, 3, 16, 16))
def non_local() -> Any:
    x = sym.Convolution(sym.Variable("data"), num_filter=16, kernel=(3, 3), stride=(2, 2))
    q, k, v = (
        sym.Reshape(sym.Convolution(x, num_filter=n, kernel=(1, 1)), shape=(0, 0, -1))
        for n in (8, 8, 16)
    )
    weights = sym.softmax(sym.batch_dot(q, k, transpose_a=True), axis=-1)
    y = sym.reshape_like(sym.batch_dot(v, weights, transpose_b=True), x)
    gamma = sym.Variable("gamma", shape=(1, 1, 1, 1))
    x = sym.broadcast_add(sym.broadcast_mul(gamma, y), x)
    return _dense(sym.mean(x, axis=(2, 3)), 10)


@network("Spatial transformer", data=(2, 1, 28, 28))
def spatial_transformer() -> Any:
    data = x = sym.Variable("data")
    for filters in (8, 10):
        x = sym.Convolution(x, num_filter=filters, kernel=(5, 5))
        x = sym.Pooling(sym.Activation(x, "relu"), kernel=(2, 2), stride=(2, 2), pool_type="max")
    place = 0.2 * _dense(_dense(sym.Flatten(x), 32, "relu"), 6)
    options = {"transform_type": "affine", "sampler_type": "bilinear"}
    x = sym.SpatialTransformer(data, place, target_shape=(20, 20), **options)
    x = sym.Activation(sym.Convolution(x, num_filter=12, kernel=(5, 5), stride=(2, 2)), "relu")
    return sym.SoftmaxOutput(_dense(sym.Flatten(x), 10), name="softmax")


@network("Warping by flow, bilinear sampler", data=(1, 3, 20, 24))
def warping() -> Any:
    data = sym.Variable("data")
    flow = sym.Convolution(data, num_filter=2, kernel=(3, 3), pad=(1, 1))
    grid = sym.GridGenerator(flow, transform_type="warp")
    x = sym.BilinearSampler(data, grid)
    return sym.Convolution(sym.concat(data, x, dim=1), num_filter=3, kernel=(3, 3), pad=(1, 1))


@network("Graph convolutions", nodes=(2, 12, 6), edges=np.abs(_draw.normal(size=(2, 12, 12))))
def graph_convolutions() -> Any:
    x, edges = sym.Variable("nodes"), sym.Variable("edges")
    degrees = sym.rsqrt(sym.sum(edges, axis=2, keepdims=True) + 1)
    edges = sym.broadcast_mul(
        sym.broadcast_mul(edges, degrees), sym.SwapAxis(degrees, dim1=1, dim2=2)
    )
    for units in (16, 12):
        x = sym.relu(sym.batch_dot(edges, _dense(x, units, flatten=False)))
    return _dense(sym.mean(x, axis=1), 4)
