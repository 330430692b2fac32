package inbox

import "time"

// UUIDv7Time returns the time in a UUID of version 7, to the millisecond. It returns false unless the id has
// its canonical spelling: 36 characters, lower-case digits, version 7, variant 8 to b. Only then does the
// order of the texts, compared byte by byte, follow the times.
func UUIDv7Time(id string) (time.Time, bool) {
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

// ULIDTime returns the time in a ULID, to the millisecond. It returns false unless the id has its canonical
// spelling: 26 characters of Crockford's alphabet, upper case, at most 128 bits. Only then does the order of
// the texts, compared byte by byte, follow the times.
func ULIDTime(id string) (time.Time, bool) {
	if len(id) != 26 || id[0] > '7' {
		return time.Time{}, false
	}
	var milliseconds int64
	for i := range len(id) {
		digit := crockford[id[i]]
		if digit == 0 {
			return time.Time{}, false
		}
		if i < 10 { // the first 48 bits
			milliseconds = milliseconds<<5 | int64(digit-1)
		}
	}
	return time.UnixMilli(milliseconds), true
}

// crockford has each digit's value plus one; zero is no digit.
var crockford = func() (digits [256]byte) {
	for value, c := range []byte("0123456789ABCDEFGHJKMNPQRSTVWXYZ") {
		digits[c] = byte(value) + 1
	}
	return digits
}()
