package inboxsql

import (
	"fmt"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// IDKind is a kind of message id whose texts, compared byte by byte, are in the order of their times. A
// partitioned inbox takes ids of one kind, in their canonical spelling: any other text sorts into a window
// that is not its time's, and would run again when that window is retired.
type IDKind int

const (
	// UUIDv7 has 36 characters, in lower case, as the UUIDs of version 7 that google/uuid makes.
	UUIDv7 IDKind = iota + 1

	// ULID has 26 characters, in upper case, as watermill.NewULID makes them.
	ULID
)

// String returns the kind's name.
func (k IDKind) String() string {
	switch k {
	case UUIDv7:
		return "UUIDv7"
	case ULID:
		return "ULID"
	}
	return fmt.Sprintf("IDKind(%d)", int(k))
}

// Time returns the time in an id, to the millisecond. It returns false unless the id is of this kind, in its
// canonical spelling.
func (k IDKind) Time(id string) (time.Time, bool) {
	switch k {
	case UUIDv7:
		return inbox.UUIDv7Time(id)
	case ULID:
		return inbox.ULIDTime(id)
	}
	return time.Time{}, false
}

// Bound returns the lowest id of the time's millisecond: the ids below it are older. Times before 1970 and
// after the year 10889 have the first and the last millisecond's.
func (k IDKind) Bound(at time.Time) string {
	milliseconds := min(max(at.UnixMilli(), 0), lastTime.UnixMilli())
	switch k {
	case UUIDv7:
		digits := fmt.Sprintf("%012x", milliseconds)
		return digits[:8] + "-" + digits[8:] + "-7000-8000-000000000000"
	case ULID:
		id := []byte("00000000000000000000000000")
		for i := 9; i >= 0; i-- {
			id[i] = crockford[milliseconds&31]
			milliseconds >>= 5
		}
		return string(id)
	}
	return ""
}

// lastTime is the last one that fits into an id, in the year 10889.
var lastTime = time.UnixMilli(1<<48 - 1)

const crockford = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

func (k IDKind) valid() bool { return k == UUIDv7 || k == ULID }

// pattern is the canonical spelling as a regular expression of PostgreSQL.
func (k IDKind) pattern() string {
	if k == UUIDv7 {
		return `^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`
	}
	return `^[0-7][0-9A-HJKMNP-TV-Z]{25}$`
}

// present is Bound of the database's time, as an expression of PostgreSQL.
func (k IDKind) present() string {
	const milliseconds = `(extract(epoch FROM now()) * 1000)::bigint`
	if k == UUIDv7 {
		return `overlay(lpad(to_hex(` + milliseconds + `), 12, '0') PLACING '-' FROM 9 FOR 0) || '-7000-8000-000000000000'`
	}
	return `(SELECT string_agg(substr('` + crockford + `', (` + milliseconds + ` >> (5 * i) & 31)::int + 1, 1), '' ORDER BY i DESC) ` +
		`FROM generate_series(0, 9) AS i) || '0000000000000000'`
}
