"""Image processing of OpenVLA's evaluations on LIBERO, bit-equal to TensorFlow: JPEG, Lanczos resize, centre crop.

The training images were JPEG-compressed at quality 95.  TensorFlow encodes with libjpeg's exact integer transform and
decodes with its fast one, which no Python library offers.  The entropy coding is lossless and is omitted.  Steps and
constants are those of libjpeg's jccolor, jcsample, jfdctint, jidctfst, jdsample and jdcolor.

RGB [H, W, 3] -> Y, Cb, Cr -> halved Cb, Cr -> blocks -> transform -> rounded to the quantisation table -> and back
"""

from __future__ import annotations

import functools
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_QUALITY = 95
_BLOCK = 8
_NARROW = 2  # columns up to which libjpeg does not interpolate
_FRACTION = 16  # bits after the point of the colour constants
_HALF = 1 << (_FRACTION - 1)
_EXACT_BITS, _PASS_BITS = 13, 2  # of the exact transform
_FAST_BITS, _SCALE_BITS = 8, 2  # of the fast transform
_AAN = (1.0, 1.387039845, 1.306562965, 1.175875602, 1.0, 0.785694958, 0.541196100, 0.275899379)
_LOBES = 3.0  # of Lanczos' filter

Planes = NDArray[np.int64]


def jpeg_round_trip(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns an image, uint8 [H, W, 3], after JPEG with 4:2:0 chroma at quality 95 and TensorFlow's decoder."""
    height, width = image.shape[:2]
    luma, blue, red = _to_ycc(image.astype(np.int64))
    tables = _quantisation()
    half = (-(-height // 2), -(-width // 2))
    planes = [
        _round_trip(_padded(luma, 2 * _BLOCK), tables[0])[:height, :width],
        *[
            _upsampled(_round_trip(_halved(plane), tables[1])[: half[0], : half[1]])[:height, :width]
            for plane in (blue, red)
        ],
    ]
    return _to_rgb(*planes)


def _constant(value: float, bits: int) -> int:
    return int(value * (1 << bits) + 0.5)


def _to_ycc(rgb: Planes) -> tuple[Planes, Planes, Planes]:
    red, green, blue = np.moveaxis(rgb, -1, 0)
    c = functools.partial(_constant, bits=_FRACTION)
    offset = (128 << _FRACTION) + _HALF - 1
    luma = (c(0.299) * red + c(0.587) * green + c(0.114) * blue + _HALF) >> _FRACTION
    to_blue = (-c(0.168735892) * red - c(0.331264108) * green + _HALF * blue + offset) >> _FRACTION
    to_red = (_HALF * red - c(0.418687589) * green - c(0.081312411) * blue + offset) >> _FRACTION
    return luma, to_blue, to_red


def _to_rgb(luma: Planes, blue: Planes, red: Planes) -> NDArray[np.uint8]:
    blue, red = blue - 128, red - 128
    c = functools.partial(_constant, bits=_FRACTION)
    green = (-c(0.34414) * blue - c(0.71414) * red + _HALF) >> _FRACTION
    parts = [luma + ((c(1.402) * red + _HALF) >> _FRACTION), luma + green]
    parts.append(luma + ((c(1.772) * blue + _HALF) >> _FRACTION))
    return np.stack(parts, axis=-1).clip(0, 255).astype(np.uint8)


def _padded(plane: Planes, multiple: int) -> Planes:
    rows, columns = (-side % multiple for side in plane.shape)
    return np.pad(plane, ((0, rows), (0, columns)), mode="edge")


def _halved(plane: Planes) -> Planes:
    """Means of 2 x 2: columns are padded before, rows afterwards; the rounding bias alternates between columns."""
    even = np.pad(plane, ((0, plane.shape[0] % 2), (0, -plane.shape[1] % (2 * _BLOCK))), mode="edge")
    sums = even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]
    bias = 1 + np.arange(sums.shape[1]) % 2
    return _padded((sums + bias) >> 2, _BLOCK)


def _upsampled(plane: Planes) -> Planes:
    """Doubles rows and columns, with means of neighbours weighted 3 to 1; narrow planes are repeated."""
    if plane.shape[1] <= _NARROW:
        return plane.repeat(2, axis=0).repeat(2, axis=1)
    rows = np.pad(plane, ((1, 1), (0, 0)), mode="edge")
    near = 3 * plane
    tall = np.stack([near + rows[:-2], near + rows[2:]], axis=1).reshape(-1, plane.shape[1])
    columns = np.pad(tall, ((0, 0), (1, 1)), mode="edge")
    left = (3 * tall + columns[:, :-2] + 8) >> 4
    right = (3 * tall + columns[:, 2:] + 7) >> 4
    return np.stack([left, right], axis=2).reshape(tall.shape[0], -1)


@functools.cache
def _quantisation() -> tuple[Planes, Planes]:
    """The tables of luma and chroma [8, 8], as the encoder writes them into a file."""
    file = io.BytesIO()
    Image.new("RGB", (_BLOCK, _BLOCK)).save(file, "JPEG", quality=_QUALITY, subsampling="4:2:0")
    tables = Image.open(file).quantization  # pyright: ignore[reportAttributeAccessIssue]
    luma, chroma = (np.array(tables[k], np.int64).reshape(_BLOCK, _BLOCK) for k in (0, 1))
    return luma, chroma


def _round_trip(plane: Planes, table: Planes) -> Planes:
    height, width = plane.shape
    blocks = plane.reshape(height // _BLOCK, _BLOCK, width // _BLOCK, _BLOCK).swapaxes(1, 2) - 128
    levels = _quantised(_forward(blocks), table)
    return _inverse(levels, table).swapaxes(1, 2).reshape(height, width)


def _quantised(coefficients: Planes, table: Planes) -> Planes:
    step = table << 3  # the transform scales by 8
    return np.sign(coefficients) * ((np.abs(coefficients) + (step >> 1)) // step)


def _rounded(values: Planes, bits: int) -> Planes:
    return (values + (1 << (bits - 1))) >> bits


def _forward(blocks: Planes) -> Planes:
    rows = _forward_pass(blocks, first=True)
    return _forward_pass(rows.swapaxes(-1, -2), first=False).swapaxes(-1, -2)


def _forward_pass(x: Planes, first: bool) -> Planes:
    """The transform along the last axis: Loeffler, Ligtenberg and Moschytz 1989, with 13 bits after the point."""
    c = functools.partial(_constant, bits=_EXACT_BITS)
    bits = _EXACT_BITS - _PASS_BITS if first else _EXACT_BITS + _PASS_BITS
    sums, differences = x[..., :4] + x[..., :3:-1], x[..., :4] - x[..., :3:-1]
    outer, inner = sums[..., :2] + sums[..., :1:-1], sums[..., :2] - sums[..., :1:-1]
    t10, t11 = np.moveaxis(outer, -1, 0)
    t13, t12 = np.moveaxis(inner, -1, 0)
    even = [t10 + t11, t10 - t11]
    out: dict[int, Planes] = dict(
        zip((0, 4), [v << _PASS_BITS if first else _rounded(v, _PASS_BITS) for v in even], strict=True)
    )
    shared = (t12 + t13) * c(0.541196100)
    out[2] = _rounded(shared + t13 * c(0.765366865), bits)
    out[6] = _rounded(shared - t12 * c(1.847759065), bits)
    t7, t6, t5, t4 = np.moveaxis(differences, -1, 0)
    z5 = (t4 + t6 + t5 + t7) * c(1.175875602)
    z1, z2 = -(t4 + t7) * c(0.899976223), -(t5 + t6) * c(2.562915447)
    z3, z4 = z5 - (t4 + t6) * c(1.961570560), z5 - (t5 + t7) * c(0.390180644)
    out[7] = _rounded(t4 * c(0.298631336) + z1 + z3, bits)
    out[5] = _rounded(t5 * c(2.053119869) + z2 + z4, bits)
    out[3] = _rounded(t6 * c(3.072711026) + z2 + z3, bits)
    out[1] = _rounded(t7 * c(1.501321110) + z1 + z4, bits)
    return np.stack([out[k] for k in range(_BLOCK)], axis=-1)


def _inverse(levels: Planes, table: Planes) -> Planes:
    scales = np.rint(np.outer(_AAN, _AAN) * (1 << 14)).astype(np.int64)
    values = levels * _rounded(table * scales, 14 - _SCALE_BITS)
    columns = _inverse_pass(values.swapaxes(-1, -2)).swapaxes(-1, -2)
    return ((_inverse_pass(columns) >> (_SCALE_BITS + 3)) + 128).clip(0, 255)


def _inverse_pass(x: Planes) -> Planes:
    """The inverse along the last axis: Arai, Agui and Nakajima 1988, products truncated to 8 bits."""

    def times(values: Planes, constant: float) -> Planes:
        sign = -1 if constant < 0 else 1
        return (values * sign * _constant(abs(constant), _FAST_BITS)) >> _FAST_BITS

    d = np.moveaxis(x, -1, 0)
    t10, t11, t13 = d[0] + d[4], d[0] - d[4], d[2] + d[6]
    t12 = times(d[2] - d[6], 1.414213562) - t13
    e0, e3, e1, e2 = t10 + t13, t10 - t13, t11 + t12, t11 - t12
    z13, z10, z11, z12 = d[5] + d[3], d[5] - d[3], d[1] + d[7], d[1] - d[7]
    o7 = z11 + z13
    z5 = times(z10 + z12, 1.847759065)
    o6 = times(z10, -2.613125930) + z5 - o7
    o5 = times(z11 - z13, 1.414213562) - o6
    o4 = times(z12, 1.082392200) - z5 + o5
    return np.stack([e0 + o7, e1 + o6, e2 + o5, e3 - o4, e3 + o4, e2 - o5, e1 - o6, e0 - o7], axis=-1)


# ----------------------------------------------------------------------------------------------------- resize and crop
def lanczos_resize(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Returns an image, uint8 [H, W, 3], as [size, size, 3], by an antialiased Lanczos filter of three lobes."""
    tall = _resampled(image.astype(np.float32), size)
    resized = _resampled(tall.swapaxes(0, 1), size).swapaxes(0, 1)
    return np.rint(resized).clip(0, 255).astype(np.uint8)


def center_crop(image: NDArray[np.uint8], area: float) -> NDArray[np.uint8]:
    """Returns the central `area` (a share in (0, 1]) of an image, uint8 [H, W, 3], enlarged to the image's size."""
    values = image.astype(np.float32) * np.float32(1.0 / 255.0)
    height, width = image.shape[:2]
    narrow = _lerp(values.swapaxes(0, 1), *_crop_places(width, area)).swapaxes(0, 1)
    cropped = _lerp(narrow, *_crop_places(height, area))
    return np.floor(cropped.clip(0.0, 1.0) * np.float32(255.5)).clip(0, 255).astype(np.uint8)


def _resampled(values: NDArray[np.float32], new_size: int) -> NDArray[np.float32]:
    """Resamples the first axis, in float32 and from the first source row to the last: sums depend on their order."""
    size = len(values)
    step = np.float32(1.0) / (np.float32(new_size) / np.float32(size))
    stretch = max(step, np.float32(1.0))
    centers = (np.arange(new_size, dtype=np.float32) + np.float32(0.5)) * step
    reach = np.float32(_LOBES) * stretch
    first = np.ceil(centers - reach - np.float32(0.5)).astype(np.int64).clip(0)
    last = np.floor(centers + reach - np.float32(0.5)).astype(np.int64).clip(max=size - 1)
    total = np.zeros(new_size, np.float32)
    weights = []
    for rows in (first + k for k in range(int((last - first).max()) + 1)):
        distance = np.abs(rows.astype(np.float32) + np.float32(0.5) - centers) * (np.float32(1.0) / stretch)
        weights.append(np.where(rows <= last, _lanczos(distance), np.float32(0.0)))
        total += weights[-1]
    resampled = np.zeros((new_size, *values.shape[1:]), np.float32)
    for k, weight in enumerate(weights):
        resampled += (weight * (np.float32(1.0) / total))[:, None, None] * values[(first + k).clip(max=size - 1)]
    return resampled


def _lanczos(x: NDArray[np.float32]) -> NDArray[np.float32]:
    lobes, turn = np.float32(_LOBES), np.float32(np.pi)
    near = np.maximum(x, np.float32(1e-3))
    values = lobes * np.sin(turn * near) * np.sin(turn * near / lobes) / (turn * turn * near * near)
    return np.where(x <= 1e-3, np.float32(1.0), np.where(x > lobes, np.float32(0.0), values))


def _crop_places(side: int, area: float) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """Returns (row before, row after, weight of the latter) of each row of the crop; its corners are pixel centres."""
    share = np.sqrt(np.float32(area))
    first = (np.float32(1.0) - share) / np.float32(2.0)
    last = first + share
    step = (last - first) * np.float32(side - 1) / np.float32(side - 1)
    places = first * np.float32(side - 1) + np.arange(side, dtype=np.float32) * step
    before = np.floor(places)
    return before.astype(np.intp), np.ceil(places).astype(np.intp), (places - before).astype(np.float32)


def _lerp(
    values: NDArray[np.float32], before: NDArray[np.intp], after: NDArray[np.intp], weight: NDArray[np.float32]
) -> NDArray[np.float32]:
    return (values[before] + (values[after] - values[before]) * weight[:, None, None]).astype(np.float32)
