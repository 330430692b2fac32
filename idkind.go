package inbox

import (
	"fmt"
	"time"
)

// IDKind is a kind of message id that begins with its time, so that the order of the texts, compared byte by
// byte, is the order of the times. Only the canonical spelling of an id has that order.
type IDKind int

const (
	// UUIDv7 has 36 characters, in lower case, as the UUIDs of version 7 that google/uuid makes.
	UUIDv7 IDKind = iota + 1

	// ULID has 26 characters of Crockford's alphabet, in upper case, as watermill.NewULID makes them.
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

// Valid reports whether the kind is one of the constants. The zero value is not.
func (k IDKind) Valid() bool { return k == UUIDv7 || k == ULID }

// Time returns the time in an id, to the millisecond. It returns false unless the id is of this kind, in its
// canonical spelling.
func (k IDKind) Time(id string) (time.Time, bool) {
	switch k {
	case UUIDv7:
		return uuidTime(id)
	case ULID:
		return ulidTime(id)
	}
	return time.Time{}, false
}

// lastIDTime is the last one that fits into an id, in the year 10889.
var lastIDTime = time.UnixMilli(1<<48 - 1)

// Bound returns the lowest id of the time's millisecond: the ids below it are older. Times before 1970 and
// after the year 10889 have the first and the last millisecond's.
func (k IDKind) Bound(at time.Time) string {
	milliseconds := min(max(at.UnixMilli(), 0), lastIDTime.UnixMilli())
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

// uuidTime wants version 7, variant 8 to b and lower-case digits.
func uuidTime(id string) (time.Time, bool) {
	if len(id) != 36 || id[14] != '7' || id[19] != '8' && id[19] != '9' && id[19] != 'a' && id[19] != 'b' {
		return time.Time{}, false
	}
	var milliseconds int64
	for i := range len(id) {
		c := id[i]
		if i == 8 || i == 13 || i == 18 || i == 23 {
			if c != '-' {
				return time.Time{}, false
			}
			continue
		}
		var digit byte
		switch {
		case '0' <= c && c <= '9':
			digit = c - '0'
		case 'a' <= c && c <= 'f':
			digit = c - 'a' + 10
		default:
			return time.Time{}, false
		}
		if i < 13 { // the first 48 bits
			milliseconds = milliseconds<<4 | int64(digit)
		}
	}
	return time.UnixMilli(milliseconds), true
}

// ulidTime wants upper case and at most 128 bits.
func ulidTime(id string) (time.Time, bool) {
	if len(id) != 26 || id[0] > '7' {
		return time.Time{}, false
	}
	var milliseconds int64
	for i := range len(id) {
		digit := crockfordValue[id[i]]
		if digit == 0 {
			return time.Time{}, false
		}
		if i < 10 { // the first 48 bits
			milliseconds = milliseconds<<5 | int64(digit-1)
		}
	}
	return time.UnixMilli(milliseconds), true
}

const crockford = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

// crockfordValue has each digit's value plus one; zero is no digit.
var crockfordValue = func() (digits [256]byte) {
	for value, c := range []byte(crockford) {
		digits[c] = byte(value) + 1
	}
	return digits
}()
