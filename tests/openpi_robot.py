"""A robot with the real openpi-client, for tests; runs in an environment of its own, since that wants numpy < 2.

openpi_robot.py URL KEY IN OUT SECONDS: connects, then sends the observations in IN (a msgpack list) in turn, one after
the other's answer, once each or for so many seconds; writes [metadata, [answer or error text, ...]] to OUT.
"""

import sys
import time

from openpi_client import msgpack_numpy
from openpi_client.websocket_client_policy import WebsocketClientPolicy

url, key, source, target, seconds = sys.argv[1:]
with open(source, "rb") as file:
    observations = msgpack_numpy.unpackb(file.read())
client = WebsocketClientPolicy(url, api_key=key)
answers = []
end = time.monotonic() + float(seconds)
sent = 0
while sent < len(observations) or time.monotonic() < end:
    try:
        answers.append(client.infer(observations[sent % len(observations)]))
    except RuntimeError as error:  # what openpi-client makes of a text
        answers.append(str(error))
    sent += 1
with open(target, "wb") as file:
    file.write(msgpack_numpy.packb([client.get_server_metadata(), answers]))
