#!/bin/sh
# A node may not set the clock: it is the machine's. This stands in for that alone: what chrony measures of its servers
# and would set the clock by, Python's programs get added here. Run again after the servers changed.
set -eu
mkdir -p /opt/clock
cat > /opt/clock/sitecustomize.py << 'END'
import time

real = time.time
with open("/opt/clock/offset") as told:
    offset = float(told.read() or 0)
time.time = lambda: real() + offset
END
printf '#!/bin/sh\nPYTHONPATH=/opt/clock exec /usr/bin/python3 "$@"\n' > /opt/clock/python3
chmod 755 /opt/clock/python3
# The mark of the source that is followed, and how far this clock is ahead of it.
chronyc -c sources 2> /dev/null | awk -F , '$2 == "*" {printf "%.3f\n", -$9}' > /opt/clock/offset
