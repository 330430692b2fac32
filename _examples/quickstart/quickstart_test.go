package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/devmappa/watermill-inbox/inboxtest"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// What one copies to test a handler of one's own.
func TestBook(t *testing.T) {
	inboxtest.TestHandler(t, func(t *testing.T) inboxtest.Handler {
		ledger, err := openLedger(context.Background(), filepath.Join(t.TempDir(), "test.db"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ledger.db.Close() })
		repository, err := inboxsql.NewRepository(ledger.db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultSQLiteSchema{}})
		if err != nil {
			t.Fatal(err)
		}
		if err := repository.InitializeSchema(context.Background()); err != nil {
			t.Fatal(err)
		}
		return inboxtest.Handler{
			Repository:      repository,
			HandleNoPublish: ledger.Book,
			Message:         message.NewMessage("1", []byte(`{"payment_id": "payment-01", "account": "account-0", "amount_cents": 1000}`)),
			State: func(ctx context.Context) (string, error) {
				effects, err := ledger.effects(ctx)
				return fmt.Sprintf("%+v", effects), err
			},
		}
	})
}

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
