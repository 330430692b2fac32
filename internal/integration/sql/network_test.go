package sql_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/internal/integration/testproxy"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// A network that swallows everything holds nobody for longer than five seconds after the end of his context, where the
// inbox can do something about it: in all steps but the commit. A rollback has no context, and takes ten.
func TestDeadNetwork(t *testing.T) {
	t.Parallel()
	write := func(ctx context.Context, way testdb.Way) error {
		return way.Exec(ctx, `INSERT INTO effects VALUES ('1')`)
	}
	for name, handle := range map[string]func(ctx context.Context, way testdb.Way) error{
		"before the claim": nil,
		"in a statement":   write,
		"in a statement without the context": func(ctx context.Context, way testdb.Way) error {
			return write(context.WithoutCancel(ctx), way)
		},
		"before the rollback": func(context.Context, testdb.Way) error { return errors.New("the handler's") },
	} {
		for _, driver := range []string{"fused", "inboxpgx"} {
			t.Run(name+", "+driver, func(t *testing.T) {
				t.Parallel()
				db := testdb.PostgreSQL(t, "postgres")
				proxy := testproxy.New(t, db.Address(t))
				way := db.Way(t, driver, db.Through(t, proxy.Address()).URL, 1)
				if err := way.InitializeSchema(context.Background()); err != nil {
					t.Fatal(err)
				}
				swallow := func() {
					proxy.Stall(testproxy.ToServer)
					proxy.Stall(testproxy.ToClient)
				}
				swallows := false
				handler := wrap(t, way, inbox.Options{ClaimTimeout: 300 * time.Millisecond}, func(msg *message.Message) error {
					if !swallows {
						return write(msg.Context(), way)
					}
					swallow()
					return handle(msg.Context(), way)
				})
				if _, err := handler(newMessage("warm up")); err != nil {
					t.Fatal(err)
				}
				swallows = true
				if handle == nil {
					swallow()
				}
				if name != "before the rollback" {
					handler = middleware.Timeout(300 * time.Millisecond)(handler)
				}
				started := time.Now()
				_, err := handler(newMessage("1"))
				took := time.Since(started)
				t.Logf("after %s: %v", took, err)
				if err == nil || inbox.ShouldPoison(err) && name != "before the rollback" {
					t.Errorf("the error is %v", err)
				}
				if took > 15*time.Second {
					t.Errorf("it came back after %s", took)
				}
				proxy.Cut()
				swallows = false
				eventually(t, "the message is processed on the network that is back", func() bool {
					_, err := handler(newMessage("1"))
					return err == nil
				})
			})
		}
	}
}

// Close returns with its context, although a mark hangs on a network that swallows everything.
func TestCloseOnADeadNetwork(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		direct := testdb.PostgreSQL(t, driver)
		proxy := testproxy.New(t, direct.Address(t))
		db := direct.Through(t, proxy.Address())
		db.SetMaxOpenConns(1)
		repository := db.Repository(t, inboxsql.Options{})
		a := newApp(t, db, repository, inbox.Options{})
		a.router.AddMiddleware(a.inbox.Middleware)
		a.router.AddHandler("book", "payments", a.broker, "events", publisherFunc(func() {
			proxy.Stall(testproxy.ToServer)
			proxy.Stall(testproxy.ToClient)
		}), func(msg *message.Message) ([]*message.Message, error) {
			return []*message.Message{newMessage("event")}, db.Write(msg.Context(), msg.UUID)
		})
		a.run()
		a.publish("payments", newMessage("1"))
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		started := time.Now()
		if err := a.inbox.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the error is %v", err)
		}
		if took := time.Since(started); took > 3*time.Second {
			t.Errorf("it came back after %s", took)
		}
		proxy.Cut()
	})
}

type publisherFunc func()

func (f publisherFunc) Publish(string, ...*message.Message) error {
	f()
	return nil
}

func (publisherFunc) Close() error { return nil }

// COPY ends with its transaction's context, as lib/pq's does.
func TestCopyEndsWithTheContext(t *testing.T) {
	t.Parallel()
	for _, driver := range []string{"postgres", "fused"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, driver)
			db.MustExec(t, `CREATE TABLE accounts (id int PRIMARY KEY)`)
			other, err := db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = other.Rollback() }()
			if _, err := other.Exec(`INSERT INTO accounts VALUES (1)`); err != nil {
				t.Fatal(err)
			}
			pid := make(chan int, 1)
			handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
				pid <- backend(t, msg.Context())
				tx, _ := inboxsql.TxFromContext(msg.Context())
				stmt, err := tx.Prepare(`COPY accounts (id) FROM STDIN`)
				if err != nil {
					return err
				}
				if _, err := stmt.Exec(1); err != nil {
					return err
				}
				_, err = stmt.Exec()
				return errors.Join(err, stmt.Close())
			})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			failed := make(chan error, 1)
			go func() {
				_, err := handler(message.NewMessageWithContext(ctx, "1", nil))
				failed <- err
			}()
			waits := `SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'`
			copying := <-pid
			eventually(t, "COPY waits for the other session", func() bool { return db.Count(t, waits, copying) == 1 })
			cancel()
			select {
			case err := <-failed:
				if !errors.Is(err, context.Canceled) {
					t.Errorf("the error is %v", err)
				}
			case <-time.After(patience / 3):
				t.Error("COPY goes on")
				_ = other.Rollback()
				<-failed
			}
		})
	}
}
