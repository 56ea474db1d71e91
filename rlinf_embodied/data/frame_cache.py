"""Decoded images of datasets, within a limit of memory: background threads decode what is asked for ahead of its use.

request --> threads decode --> kept, up to max_bytes --> get, which waits for what is still being decoded
                               what was not used for longest is dropped, and decoded again when it is needed
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rlinf_embodied.data.recorded import RecordedDataset

_Key = tuple[int, str, int]  # dataset, camera, frame
_Decoded = dict[_Key, np.ndarray]


class FrameCache:
    """Images by dataset, camera and frame."""

    def __init__(self, max_bytes: float, num_threads: int = 1) -> None:
        """Takes how much is kept; images that are being decoded or used come in addition."""
        self._max_bytes, self._bytes = max_bytes, 0
        self._threads = ThreadPoolExecutor(num_threads, "decode")
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, np.ndarray | Future[_Decoded]] = OrderedDict()

    def request(self, dataset: RecordedDataset, camera: str, frames: Iterable[int]) -> list[np.ndarray | Future]:
        """Has frames decoded that are not kept yet; returns each, or the future of a dict in which it will be."""
        keys = [(id(dataset), camera, int(frame)) for frame in frames]
        with self._lock:
            missing = sorted({key for key in keys if key not in self._kept})
            if missing:
                future = self._threads.submit(self._decode, dataset, missing)
                self._kept.update(dict.fromkeys(missing, future))
            for key in keys:
                self._kept.move_to_end(key)
            return [self._kept[key] for key in keys]

    def get(self, dataset: RecordedDataset, camera: str, frames: np.ndarray) -> np.ndarray:
        """Returns a camera's images of frames [...], uint8 [..., H, W, 3].

        Raises:
            DataError: a file is missing or damaged.
        """
        flat = frames.reshape(-1)
        found = zip(flat.tolist(), self.request(dataset, camera, flat), strict=True)
        images = [x.result()[id(dataset), camera, frame] if isinstance(x, Future) else x for frame, x in found]
        return np.stack(images).reshape(*frames.shape, *images[0].shape)

    def _decode(self, dataset: RecordedDataset, keys: list[_Key]) -> _Decoded:
        try:
            images = dataset.images(keys[0][1], [frame for *_, frame in keys])
        except BaseException:
            with self._lock:
                for key in keys:
                    del self._kept[key]
            raise
        decoded = {key: image.copy() for key, image in zip(keys, images, strict=True)}  # views would keep all of them
        with self._lock:
            self._kept.update(decoded)
            self._bytes += sum(image.nbytes for image in decoded.values())
            for key in list(self._kept) if self._bytes > self._max_bytes else ():
                kept = self._kept[key]
                if self._bytes <= self._max_bytes:
                    break
                if not isinstance(kept, Future):
                    del self._kept[key]
                    self._bytes -= kept.nbytes
        return decoded
