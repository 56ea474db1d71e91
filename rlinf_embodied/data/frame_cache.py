"""Decoded images of datasets, within a memory limit: background threads decode requested images ahead of their use.

request --> threads decode --> cache of up to max_bytes --> get, which waits for images that are still being decoded
                               drops the least recently used images, which are decoded again when they are needed
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
        """Takes the size of the cache; images that are being decoded or used are not counted."""
        self._max_bytes, self._bytes = max_bytes, 0
        self._threads = ThreadPoolExecutor(num_threads, "decode")
        self._lock = threading.Lock()
        self._cached: OrderedDict[_Key, np.ndarray | Future[_Decoded]] = OrderedDict()

    def request(self, dataset: RecordedDataset, camera: str, frames: Iterable[int]) -> list[np.ndarray | Future]:
        """Starts to decode frames that are not cached; returns each image, or a future of a dict with it."""
        keys = [(id(dataset), camera, int(frame)) for frame in frames]
        with self._lock:
            missing = sorted({key for key in keys if key not in self._cached})
            if missing:
                future = self._threads.submit(self._decode, dataset, missing)
                self._cached.update(dict.fromkeys(missing, future))
            for key in keys:
                self._cached.move_to_end(key)
            return [self._cached[key] for key in keys]

    def get(self, dataset: RecordedDataset, camera: str, frames: np.ndarray) -> np.ndarray:
        """Returns a camera's images of frames [...], uint8 [..., H, W, 3].

        Raises:
            DataError: a file is missing or damaged.
        """
        flat = frames.reshape(-1)
        entries = zip(flat.tolist(), self.request(dataset, camera, flat), strict=True)
        images = [x.result()[id(dataset), camera, frame] if isinstance(x, Future) else x for frame, x in entries]
        return np.stack(images).reshape(*frames.shape, *images[0].shape)

    def _decode(self, dataset: RecordedDataset, keys: list[_Key]) -> _Decoded:
        try:
            images = dataset.images(keys[0][1], [frame for *_, frame in keys])
        except BaseException:
            with self._lock:
                for key in keys:
                    del self._cached[key]
            raise
        decoded = {key: image.copy() for key, image in zip(keys, images, strict=True)}  # a view would keep all images
        with self._lock:
            self._cached.update(decoded)
            self._bytes += sum(image.nbytes for image in decoded.values())
            for key in list(self._cached) if self._bytes > self._max_bytes else ():
                image = self._cached[key]
                if self._bytes <= self._max_bytes:
                    break
                if not isinstance(image, Future):
                    del self._cached[key]
                    self._bytes -= image.nbytes
        return decoded
