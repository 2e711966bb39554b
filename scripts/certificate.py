"""Makes a certificate for a trial of TLS, of an authority of its own, for the host names and addresses given.

Writes cert.pem and key.pem (mode 0600), for tls_cert and tls_key of config/gateway.yaml, and ca.pem, which clients
need: SSL_CERT_FILE=ca.pem, or requests' verify="ca.pem". The authority's own key is kept nowhere, so it certifies
nothing else, and the next run makes another ca.pem. In production mount the certificates of your own authority.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme

from scripts.package import ROOT


def write_certificate(folder: Path, names: list[str], days: float) -> None:
    """Writes cert.pem, key.pem and ca.pem into `folder`, over what is there. names: DNS names and IP addresses.

    Raises ValueError for a name that is none, OSError where nothing can be written.
    """
    until = datetime.now(timezone.utc) + timedelta(days=days)
    authority = trustme.CA()
    made = authority.issue_cert(*names, not_after=until)
    files = {
        "cert.pem": b"".join(blob.bytes() for blob in made.cert_chain_pems),
        "key.pem": made.private_key_pem.bytes(),
        "ca.pem": authority.cert_pem.bytes(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        fresh = folder / f".{name}"
        fresh.unlink(missing_ok=True)
        mode = 0o600 if name == "key.pem" else 0o644
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        fresh.replace(folder / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["localhost", "127.0.0.1"], metavar="NAME",
                        help="host names and addresses (default: localhost 127.0.0.1)")  # fmt: skip
    parser.add_argument("--days", type=float, default=30, help="how long it holds (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / ".run" / "tls", metavar="DIR", help="(default: .run/tls)")
    args = parser.parse_args()
    try:
        write_certificate(args.out, args.names, args.days)
    except (ValueError, OSError, OverflowError) as error:
        print(f"certificate: {error}", file=sys.stderr)
        return 1
    print(f"tls_cert: {args.out.resolve() / 'cert.pem'}\ntls_key: {args.out.resolve() / 'key.pem'}")
    print(f"# clients trust {args.out.resolve() / 'ca.pem'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
