"""A request's own failure, in the form of RFC 9457 (problem details)."""

from __future__ import annotations

# Fixed ASCII phrases: TorchServe counts a phrase's characters but sends UTF-8, so anything else breaks the worker.
TITLES = {
    400: "Bad Request",
    404: "Not Found",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    422: "Unprocessable Content",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}

# What metrics and the log say of a failure beside its status; a problem that names none has the first. For 422 it is
# the part of the observation, see `handler.telemetry`.
REASONS = {
    400: ("undecodable",),
    404: ("no_such_operation",),
    413: ("too_large",),
    415: ("content_type",),
    500: ("failure", "not_finite"),
    503: ("accelerator_lost", "out_of_memory"),
    504: ("deadline",),
}


class Problem(Exception):
    """One request failed; its neighbours in the wave did not.

    Args:
        status: one of TITLES: 400 undecodable, 404 no such operation, 413 over a limit, 415 unknown type, 422 breaks
            the contract, 500 this row's own failure, 503 try again, 504 past its deadline.
        detail: which field, what was expected, what came, what to do. Never a traceback, secret or path.
        pointer: RFC 6901 pointer to the field in the request as it was sent, when one field is to blame.
        retry_after: seconds after which a retry makes sense (503 only).
        reason: one of REASONS[status].
    """

    def __init__(
        self, status: int, detail: str, pointer: str | None = None, retry_after: int | None = None,
        reason: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(detail)
        self.status = status
        self.title = TITLES[status]
        self.detail = detail
        self.pointer = pointer
        self.retry_after = retry_after
        self.reason = reason or REASONS.get(status, ("contract",))[0]
