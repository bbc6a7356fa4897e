"""What the author of a client has to know besides the messages: the beginning of docs/api/README.md."""

from __future__ import annotations

from collections.abc import Iterator

from twinstage.errors import (
    ConfigError,
    IllegalTransition,
    IntegrityError,
    ModelError,
    TransferError,
    TwinstageError,
)
from twinstage.rpc.status import all_error_classes, code_of

# Of processes that start, and between workers: no call of the public API ends with them.
_INTERNAL = (ModelError, ConfigError, TransferError, IllegalTransition, IntegrityError)

_BEFORE_ERRORS = """\
## Make a client

Every gRPC toolchain makes stubs of `protos/twinstage/v1`, which imports nothing but `google/protobuf`:

```sh
protoc -I protos --go_out=gen --go-grpc_out=gen protos/twinstage/v1/*.proto          # Go
protoc -I protos --java_out=gen --grpc-java_out=gen protos/twinstage/v1/*.proto      # Java: package io.twinstage.v1
```

Go packages lie where `go_package` says, `github.com/twinstage/twinstage/gen/go/twinstage/v1`;
`--go_opt=module=PREFIX` and `--go-grpc_opt=module=PREFIX` cut the beginning off, and `M` options put them elsewhere.
In Python, `twinstage.client` is a client already. In Node.js, `@grpc/proto-loader` reads the protos at run time, as
`tests/node_client/stream_answer.js` shows.

- **Left out or zero.** A field marked *optional* that is left out takes the default given here; zero, where it is
  set, means zero. For other fields, zero and empty are the default. Unknown values of enumerations and unknown events
  come from newer servers: pass them over.
- **Deadlines.** Set one on every call. A call without one gets 10 minutes, and none gets more than an hour, unless
  the operator says otherwise. To end a request, cancel its call: everything that it holds is freed at once.
- **Streams** have the events `prompt_info`, then `prompt_logprobs` where they were asked for, then `delta`s, one
  `finished` for each continuation, and last exactly one `summary`. A stream that ends without it has failed, and its
  status says why. Nothing is sent before the first token is there, so that gRPC may repeat a call which no server
  took.
- **EncodeStream** answers in order while inputs are sent: read and write at the same time. Beyond 128 inputs whose
  answers were not read, the server stops reading.
- **Sizes.** A request has at most 4 MiB, an answer at most 64 MiB. Most gRPC libraries refuse to receive more than 4
  MiB unless they are told: `grpc.MaxCallRecvMsgSize` (Go), `maxInboundMessageSize` (Java). [Limits](../limits.md) has
  all others.
- **Connections.** One is enough for 1,024 calls at once. After half an hour the router closes it gracefully, and gRPC
  opens another one by itself. Keepalive pings may come every 10 seconds, calls or not. gzip is understood.

| metadata of a call | |
|---|---|
| `authorization` | `Bearer TOKEN`, where the router asks for tokens |
| `x-request-id` | the request's id, where its message has none |
| `x-caller` | who calls, among whom the router's time is shared; counts only where no tokens are asked for |
| `traceparent` | W3C Trace Context: the request stays in this trace |

## Errors

Calls fail with a gRPC status alone, never with a field of an answer. Its details (`google.rpc.Status` in the trailer
`grpc-status-details-bin`) always have an `ErrorInfo` of the domain `twinstage`, whose `reason` is stable.
`RequestInfo` has the request's id, `BadRequest` every wrong field with its path, `ResourceInfo` what was not found or
exists already, `RetryInfo` when to come back; clients that repeat calls by themselves find the same in the trailer
`grpc-retry-pushback-ms`. A status without details comes from gRPC itself or from something between client and router.

| code | reason | | again |
|---|---|---|---|
"""

_AFTER_ERRORS = """
`STREAM_BROKEN` has `tokens_sent` in the metadata of its `ErrorInfo`. Repeat no call of which a part of the answer has
come, and no other one on your own account after UNAVAILABLE without `RetryInfo`: it may have been served.
"""


def guide() -> Iterator[str]:
    """The text, with a row for each error that a client may see."""
    yield _BEFORE_ERRORS
    for error_class in all_error_classes():
        if not issubclass(error_class, _INTERNAL):
            yield _row(error_class)
    yield _AFTER_ERRORS


def _row(error_class: type[TwinstageError]) -> str:
    meaning = " ".join((error_class.__doc__ or "").split()).partition(";")[0].rstrip(".")
    again = "when `RetryInfo` says" if error_class.retryable else "no"
    return f"| {code_of(error_class).name} | `{error_class.reason}` | {meaning} | {again} |\n"
