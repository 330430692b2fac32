package inbox_test

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/google/uuid"

	inbox "github.com/devmappa/watermill-inbox"
)

func TestUUIDv7Time(t *testing.T) {
	testIDTime(t, inbox.UUIDv7.Time, map[string]string{
		"00000000-0000-7000-8000-000000000000": "1970-01-01T00:00:00Z",
		"00000000-0001-7fff-bfff-ffffffffffff": "1970-01-01T00:00:00.001Z",
		"017f22e2-79b0-7cc3-98c4-dc0c0c07398f": "2022-02-22T19:22:22Z", // of RFC 9562
		"01941f29-7c00-7000-9000-000000000000": "2025-01-01T00:00:00Z",
		"ffffffff-ffff-7000-a000-000000000000": "10889-08-02T05:31:50.655Z", // the last one
	}, map[string]string{
		"empty":           "",
		"upper case":      "017F22E2-79B0-7CC3-98C4-DC0C0C07398F",
		"one upper digit": "017f22e2-79b0-7cc3-98c4-dc0c0c07398F",
		"no dashes":       "017f22e279b07cc398c4dc0c0c07398f",
		"braces":          "{017f22e2-79b0-7cc3-98c4-dc0c0c0739}",
		"version 4":       "017f22e2-79b0-4cc3-98c4-dc0c0c07398f",
		"version 6":       "017f22e2-79b0-6cc3-98c4-dc0c0c07398f",
		"variant 0":       "017f22e2-79b0-7cc3-08c4-dc0c0c07398f",
		"variant c":       "017f22e2-79b0-7cc3-c8c4-dc0c0c07398f",
		"variant B":       "017f22e2-79b0-7cc3-B8c4-dc0c0c07398f",
		"a dash moved":    "017f22e27-9b0-7cc3-98c4-dc0c0c07398f",
		"a dash too many": "017f22e2-79b0-7cc3-98c4-dc0c0c07398-",
		"not a digit":     "017f22e2-79b0-7cc3-98c4-dc0c0c07398g",
		"too long":        "017f22e2-79b0-7cc3-98c4-dc0c0c07398f0",
		"36 bytes, é":     "017f22e2-79b0-7cc3-98c4-dc0c0c0739é",
		"a ULID":          "01ARZ3NDEKTSV4RRFFQ69G5FAV",
	})
	id, err := uuid.NewV7()
	if err != nil {
		t.Fatal(err)
	}
	at, ok := inbox.UUIDv7.Time(id.String())
	if seconds, nanoseconds := id.Time().UnixTime(); !ok || at.UnixMilli() != time.Unix(seconds, nanoseconds).UnixMilli() {
		t.Errorf("%s: %s, %v", id, at, ok)
	}
}

func TestULIDTime(t *testing.T) {
	testIDTime(t, inbox.ULID.Time, map[string]string{
		"00000000000000000000000000": "1970-01-01T00:00:00Z",
		"0000000001ZZZZZZZZZZZZZZZZ": "1970-01-01T00:00:00.001Z",
		"01ARZ3NDEKTSV4RRFFQ69G5FAV": "2016-07-30T23:54:10.259Z", // of the ULID specification
		"7ZZZZZZZZZZZZZZZZZZZZZZZZZ": "10889-08-02T05:31:50.655Z",
	}, map[string]string{
		"empty":             "",
		"lower case":        "01arz3ndektsv4rrffq69g5fav",
		"one lower letter":  "01ARZ3NDEKTSV4RRFFQ69G5FAv",
		"more than 128 bit": "8ZZZZZZZZZZZZZZZZZZZZZZZZZ",
		"an I":              "01ARZ3NDEKTSV4RRFFQ69G5FAI",
		"an L":              "01ARZ3NDEKTSV4RRFFQ69G5FAL",
		"an O":              "O1ARZ3NDEKTSV4RRFFQ69G5FAV",
		"a U":               "01ARZ3NDEKTSV4RRFFQ69G5FAU",
		"too short":         "01ARZ3NDEKTSV4RRFFQ69G5FA",
		"too long":          "01ARZ3NDEKTSV4RRFFQ69G5FAVV",
		"26 bytes, é":       "01ARZ3NDEKTSV4RRFFQ69G5Fé",
		"NUL":               "01ARZ3NDEKTSV4RRFFQ69G5FA\x00",
		"a UUID":            "017f22e2-79b0-7cc3-98c4-dc0c0c07398f",
	})
	before := time.Now().UnixMilli()
	id := watermill.NewULID()
	if at, ok := inbox.ULID.Time(id); !ok || at.UnixMilli() < before || at.After(time.Now()) {
		t.Errorf("%s: %s, %v", id, at, ok)
	}
}

func testIDTime(t *testing.T, idTime func(string) (time.Time, bool), want, refused map[string]string) {
	t.Helper()
	for id, at := range want {
		got, ok := idTime(id)
		if !ok || got.UTC().Format("2006-01-02T15:04:05.999Z07:00") != at {
			t.Errorf("%s: %s, %v, want %s", id, got.UTC(), ok, at)
		}
		if n := testing.AllocsPerRun(10, func() { idTime(id) }); n != 0 {
			t.Errorf("%s: %v allocations", id, n)
		}
	}
	for name, id := range refused {
		if got, ok := idTime(id); ok || !got.IsZero() {
			t.Errorf("%s: %q is taken, as %s", name, id, got)
		}
	}
}

// lastIDTime is the last one that fits into an id.
var lastIDTime = time.UnixMilli(1<<48 - 1)

var kinds = []inbox.IDKind{inbox.UUIDv7, inbox.ULID}

// A bound is the first id of its millisecond, and bounds are in the order of their times.
func TestBound(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	times := []time.Time{time.UnixMilli(0), time.UnixMilli(1), noon, noon.Add(time.Millisecond), noon.Add(24 * time.Hour), lastIDTime}
	for _, kind := range kinds {
		before := ""
		for _, at := range times {
			bound := kind.Bound(at)
			if got, ok := kind.Time(bound); !ok || !got.Equal(at) {
				t.Errorf("%s: the bound of %s is %s, of %s", kind, at, bound, got)
			}
			if bound <= before {
				t.Errorf("%s: %s is not above %s", kind, bound, before)
			}
			before = bound
		}
		if kind.Bound(time.Unix(-1, 0)) != kind.Bound(time.UnixMilli(0)) || kind.Bound(lastIDTime.Add(time.Hour)) != kind.Bound(lastIDTime) {
			t.Errorf("%s: times without an id have another bound", kind)
		}
	}
	if got := inbox.UUIDv7.Bound(noon); got != "01a23179-de00-7000-8000-000000000000" {
		t.Errorf("noon is %s", got)
	}
}
