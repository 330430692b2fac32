package sql_test

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// Stored bytes come back whatever the server's text format for them is, also from a driver that asks for text.
func TestStoredMessagesUnderByteaOutputEscape(t *testing.T) {
	t.Parallel()
	produced := []byte("\x01\x00\\x'\xff")
	for i := range 256 {
		produced = append(produced, byte(i))
	}
	for name, c := range map[string]struct{ driver, parameters string }{
		"pgx":                  {"pgx", "&standard_conforming_strings=off"},
		"pgx, exec mode":       {"pgx", "&default_query_exec_mode=exec&standard_conforming_strings=off"},
		"pgx, simple protocol": {"pgx", "&default_query_exec_mode=simple_protocol"}, // which pgx refuses with the other setting
		"lib-pq":               {"postgres", "&standard_conforming_strings=off"},
		"lib-pq, fused":        {"fused", "&standard_conforming_strings=off"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, c.driver)
			db.URL += "&bytea_output=escape" + c.parameters
			db.DB = db.Open(t)
			var setting string
			if err := db.QueryRow(`SHOW bytea_output`).Scan(&setting); err != nil || setting != "escape" {
				t.Fatalf("%q, %v", setting, err)
			}
			repository := db.Repository(t, inboxsql.Options{})
			ctx, key := context.Background(), inbox.Key{Consumer: "c", MessageID: "1"}
			transaction, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: key})
			if err != nil {
				t.Fatal(err)
			}
			stored := inbox.Record{Key: key, Topic: `back\slash'`, Produced: produced}
			if stored.ProcessedAt, err = transaction.Store(ctx, inbox.StoreParams{Topic: stored.Topic, Produced: produced}); err != nil {
				t.Fatal(err)
			}
			if err := transaction.Commit(ctx); err != nil {
				t.Fatal(err)
			}
			want := func(how string, got inbox.Record, err error) {
				t.Helper()
				if err != nil || got.Compare(stored) != 0 || got.Topic != stored.Topic || !bytes.Equal(got.Produced, produced) {
					t.Errorf("%s: %+v, %v", how, got, err)
				}
			}
			_, record, err := repository.Claim(ctx, inbox.ClaimParams{Key: key})
			if err != nil || record == nil {
				t.Fatalf("the copy: %v, %v", record, err)
			}
			want("the copy", *record, err)
			for _, unsent := range []bool{false, true} {
				found, err := repository.FindRecords(ctx, inbox.Selection{Unsent: unsent}, inbox.Record{}, 2)
				if err != nil || len(found) != 1 {
					t.Fatalf("found %+v, %v", found, err)
				}
				want("found", found[0], err)
			}
			leased, err := repository.LeaseUnsent(ctx, inbox.Selection{Unsent: true}, inbox.Record{}, 2, patience)
			if err != nil || len(leased) != 1 {
				t.Fatalf("leased %+v, %v", leased, err)
			}
			want("leased", leased[0], err)

			// Through a router: a publish that fails, and the replay.
			a := newApp(t, db, repository, inbox.Options{PublishBackOff: 1})
			a.router.AddMiddleware(a.inbox.Middleware)
			events := &recorder{fails: 1}
			a.router.AddHandler("book", "payments", a.broker, "events", events, func(*message.Message) ([]*message.Message, error) {
				return []*message.Message{message.NewMessage("event", produced)}, nil
			})
			a.run()
			a.publish("payments", newMessage("2"))
			if got := events.all(); len(got) != 1 || got[0].UUID != "event" || !bytes.Equal(got[0].Payload, produced) {
				t.Errorf("published %+v", got)
			}
		})
	}
}

// Large messages are stored and read back without many copies of them.
func TestMemoryOfALargeStoredMessage(t *testing.T) {
	const size = 16 << 20
	// In times of the message's size. What is read back comes as text in base64.
	for way, most := range map[string]struct{ store, replay float64 }{
		"postgres": {4, 4},
		"fused":    {4, 4},
		"inboxpgx": {4, 4},
	} {
		t.Run(way, func(t *testing.T) {
			_, service := openWay(t, way)
			ctx := context.Background()
			process := func(id string, payload []byte, store bool) {
				transaction, record, err := service.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: id}})
				if err != nil {
					t.Fatal(err)
				}
				if !store {
					if record == nil || !bytes.Equal(record.Produced, payload) {
						t.Fatal("the stored message is another one")
					}
					return
				}
				_, err = transaction.Store(ctx, inbox.StoreParams{Topic: "events", Produced: payload})
				if err := errors.Join(err, transaction.Commit(ctx)); err != nil {
					t.Fatal(err)
				}
			}
			process("small", []byte("x"), true) // connects
			process("small", []byte("x"), false)
			payload := make([]byte, size)
			for i := range payload {
				payload[i] = byte(i * i)
			}
			for _, store := range []bool{true, false} {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				process("large", payload, store)
				runtime.ReadMemStats(&after)
				times := float64(after.TotalAlloc-before.TotalAlloc) / size
				t.Logf("store %v: %.2f times the message's size", store, times)
				limit := most.replay
				if store {
					limit = most.store
				}
				if times > limit {
					t.Errorf("store %v: %.2f times the message's size is allocated, want at most %.1f", store, times, limit)
				}
			}
		})
	}
}

// That messages cannot be stored is not their handler's fault: nothing is poisoned while an administrator repairs it.
func TestAFailingStoreIsNotTheHandlersFault(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]struct{ begin, end string }{
		"the table of unsent messages is away": {`ALTER TABLE watermill_inbox_unsent RENAME TO away`, `ALTER TABLE away RENAME TO watermill_inbox_unsent`},
		"a column of somebody's must be set":   {`ALTER TABLE watermill_inbox_unsent ADD COLUMN other text NOT NULL`, `ALTER TABLE watermill_inbox_unsent DROP COLUMN other`},
		"a CHECK of somebody's":                {`ALTER TABLE watermill_inbox_unsent ADD CONSTRAINT short CHECK (length(topic) < 3)`, `ALTER TABLE watermill_inbox_unsent DROP CONSTRAINT short`},
	} {
		for _, way := range testdb.Ways {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				db, service := openWay(t, way)
				wantClaim(t, service, "warm up", true)
				db.MustExec(t, fault.begin)
				store := func() error {
					transaction, _, err := service.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}})
					if err != nil {
						t.Fatal(err)
					}
					if _, err := transaction.Store(context.Background(), inbox.StoreParams{Topic: "events", Produced: []byte("x")}); err != nil {
						return &inbox.Error{Step: "store", Err: errors.Join(err, transaction.Rollback())}
					}
					return transaction.Commit(context.Background())
				}
				if err := store(); err == nil || inbox.ShouldPoison(err) || !inbox.ShouldRetry(middleware.RetryParams{Err: err}) {
					t.Errorf("the error is %v, want one that leaves the message with the broker", err)
				}
				db.MustExec(t, fault.end)
				if err := store(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// A role that has lost a privilege since the check is not the handler's fault either; one that the handler has set is.
func TestAStoreThatIsDenied(t *testing.T) {
	t.Parallel()
	for _, driver := range []string{"postgres", "fused", "pgx"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, driver)
			db.Repository(t, inboxsql.Options{})
			role := "role_" + testdb.RandomName()
			var schema string
			if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
				t.Fatal(err)
			}
			db.MustExec(t, `CREATE ROLE `+role+` LOGIN`)
			t.Cleanup(func() { db.MustExec(t, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
			db.MustExec(t, `GRANT USAGE ON SCHEMA `+schema+` TO `+role+`; GRANT ALL ON watermill_inbox, watermill_inbox_unsent TO `+role)
			asRole := *db
			asRole.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+role+"@", 1)
			asRole.DB = asRole.Open(t)
			repository := asRole.RepositoryWithoutSchema(t, inboxsql.Options{})
			if err := repository.Check(context.Background()); err != nil {
				t.Fatal(err)
			}
			db.MustExec(t, `REVOKE INSERT ON watermill_inbox_unsent FROM `+role)
			transaction, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}})
			if err != nil {
				t.Fatal(err)
			}
			_, err = transaction.Store(context.Background(), inbox.StoreParams{Topic: "events", Produced: []byte("x")})
			if err == nil || errors.Is(err, inbox.ErrTransactionBroken) {
				t.Fatalf("the error is %v, want one that is not the handler's", err)
			}
			if err := transaction.Rollback(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
