package main

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	var out strings.Builder
	if err := run(context.Background(), &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, sentence := range []string{
		"Without the inbox 20 payments became 62 bookings",
		"With the inbox every payment was booked once",
	} {
		if !strings.Contains(out.String(), sentence) {
			t.Errorf("%q is not in the output:\n%s", sentence, &out)
		}
	}
}

func TestProcess(t *testing.T) {
	for _, tc := range []struct {
		name      string
		withInbox bool
		runs      int64
		want      effects
	}{
		// Each payment once, the two that failed once more, and the malformed message with its copies,
		// which leaves no claim.
		{"with the inbox", true, payments + 2 + copies, expected()},
		// Each copy, and what the two failed attempts left in the ledger.
		{"without", false, (payments+1)*copies + 2, effects{
			rows:     payments*copies + 2,
			ledger:   expected().ledger*copies + amount(4) + amount(11),
			accounts: expected().accounts * copies,
			poisoned: 1,
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := process(context.Background(), filepath.Join(t.TempDir(), "test.db"), tc.withInbox)
			if err != nil {
				t.Fatal(err)
			}
			if got.effects != tc.want || got.runs != tc.runs {
				t.Errorf("got %+v, want effects %+v and %d handler runs", got, tc.want, tc.runs)
			}
		})
	}
}
