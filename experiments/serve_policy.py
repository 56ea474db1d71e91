"""Serves a checkpoint in openpi's websocket protocol, so that openpi-client and policy=remote talk to it.

python experiments/serve_policy.py checkpoint=runs/demo/checkpoints/latest
python experiments/serve_policy.py checkpoint=runs/demo/checkpoints/latest host=0.0.0.0 port=8001
curl http://localhost:8000/healthz          OK
curl http://localhost:8000/latency          a histogram, which is printed at the end, too
"""

from rlinf_embodied import serve
from rlinf_embodied.command_line import main
from rlinf_embodied.config import ServeConfig

if __name__ == "__main__":
    main(serve, ServeConfig)
