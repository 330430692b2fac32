package sql_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	watermillsql4 "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/outbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// outboxSchema has payloads of bytes.
var outboxSchema = watermillsql.DefaultPostgreSQLSchema{GeneratePayloadType: func(string) string { return "BYTEA" }}

// newOutbox makes the topics' tables and a publisher.
func newOutbox(t *testing.T, db *testdb.Database, topics ...string) *outbox.Publisher {
	t.Helper()
	for _, topic := range topics {
		for _, query := range outboxSchema.SchemaInitializingQueries(topic) {
			db.MustExec(t, query.Query)
		}
	}
	publisher, err := outbox.NewPublisher(outbox.Options{SchemaAdapter: outboxSchema})
	if err != nil {
		t.Fatal(err)
	}
	return publisher
}

// outboxOf returns the UUIDs in a topic's table.
func outboxOf(t *testing.T, db *testdb.Database, topic string) []string {
	t.Helper()
	rows, err := db.Query(`SELECT uuid FROM watermill_` + topic + ` ORDER BY "offset"`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	uuids := []string{}
	for rows.Next() {
		var uuid string
		if err := rows.Scan(&uuid); err != nil {
			t.Fatal(err)
		}
		uuids = append(uuids, uuid)
	}
	return uuids
}

// What is published through the transaction is there if and only if the handler's work is.
func TestTransactionalPublisher(t *testing.T) {
	t.Parallel()
	// Each way publishes the messages 1 and 2 of the delivery to "events" and 3 to "mails".
	ids := func(msg *message.Message) []string {
		return []string{msg.UUID + "-1", msg.UUID + "-2", msg.UUID + "-3"}
	}
	within := func(ctx context.Context, id string) *message.Message {
		return message.NewMessageWithContext(ctx, id, []byte{0, 0xff})
	}
	for name, publish := range map[string]func(t *testing.T, publisher message.Publisher) func(msg *message.Message) error{
		"plain": func(_ *testing.T, publisher message.Publisher) func(*message.Message) error {
			return func(msg *message.Message) error {
				id := ids(msg)
				if err := publisher.Publish("events", within(msg.Context(), id[0]), within(msg.Context(), id[1])); err != nil {
					return err
				}
				return publisher.Publish("mails", within(msg.Context(), id[2]))
			}
		},
		"event bus and command bus": func(t *testing.T, publisher message.Publisher) func(*message.Message) error {
			var next string
			marshaler := cqrs.JSONMarshaler{NewUUID: func() string { return next }}
			events, err := cqrs.NewEventBusWithConfig(publisher, cqrs.EventBusConfig{
				GeneratePublishTopic: func(cqrs.GenerateEventPublishTopicParams) (string, error) { return "events", nil },
				Marshaler:            marshaler,
			})
			if err != nil {
				t.Fatal(err)
			}
			commands, err := cqrs.NewCommandBusWithConfig(publisher, cqrs.CommandBusConfig{
				GeneratePublishTopic: func(cqrs.CommandBusGeneratePublishTopicParams) (string, error) { return "mails", nil },
				Marshaler:            marshaler,
			})
			if err != nil {
				t.Fatal(err)
			}
			return func(msg *message.Message) error {
				id := ids(msg)
				for _, next = range id[:2] {
					if err := events.Publish(msg.Context(), &paymentBooked{ID: "p"}); err != nil {
						return err
					}
				}
				next = id[2]
				return commands.Send(msg.Context(), &paymentBooked{ID: "p"})
			}
		},
		"watermill-sql v4 on the transaction": func(*testing.T, message.Publisher) func(*message.Message) error {
			return func(msg *message.Message) error {
				tx, ok := inboxsql.TxFromContext(msg.Context())
				if !ok {
					return errors.New("the inbox middleware is missing")
				}
				publisher, err := watermillsql4.NewPublisher(watermillsql4.TxFromStdSQL(tx), watermillsql4.PublisherConfig{
					SchemaAdapter: watermillsql4.DefaultPostgreSQLSchema{GeneratePayloadType: func(string) string { return "BYTEA" }},
				}, watermill.NopLogger{})
				if err != nil {
					return err
				}
				id := ids(msg)
				if err := publisher.Publish("events", within(msg.Context(), id[0]), within(msg.Context(), id[1])); err != nil {
					return err
				}
				return publisher.Publish("mails", within(msg.Context(), id[2]))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			db.SetMaxOpenConns(1)
			do := publish(t, newOutbox(t, db, "events", "mails"))
			fails := 2
			a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
			a.router.AddMiddleware(a.order()...)
			a.handle("book", "payments", func(msg *message.Message) error {
				if err := db.Write(msg.Context(), msg.UUID); err != nil {
					return err
				}
				if err := do(msg); err != nil {
					return err
				}
				if fails--; fails >= 0 {
					return errors.New("the handler fails after publishing")
				}
				return nil
			})
			a.run()
			a.publish("payments", newMessage("m"), newMessage("m"), newMessage("n"))
			a.wantEffects("m", "n")
			if got, want := outboxOf(t, db, "events"), []string{"m-1", "m-2", "n-1", "n-2"}; !slices.Equal(got, want) {
				t.Errorf("events are %q, want %q", got, want)
			}
			if got, want := outboxOf(t, db, "mails"), []string{"m-3", "n-3"}; !slices.Equal(got, want) {
				t.Errorf("mails are %q, want %q", got, want)
			}
		})
	}
}

// Options.Outbox takes what the handler returns; the router publishes nothing.
func TestOutboxOfTheMiddleware(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.SetMaxOpenConns(1)
	a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{Outbox: newOutbox(t, db, "events")})
	a.router.AddMiddleware(a.order()...)
	router := &recorder{}
	fails := 1
	a.router.AddHandler("book", "payments", a.broker, "events", router, func(msg *message.Message) ([]*message.Message, error) {
		if err := db.Write(msg.Context(), msg.UUID); err != nil {
			return nil, err
		}
		if fails--; fails >= 0 {
			return nil, errors.New("fails once")
		}
		// One of them is the incoming message itself, one has no UUID, and one has another context.
		named := message.NewMessage("named-"+msg.UUID, []byte("x"))
		return []*message.Message{named, msg, message.NewMessage("", nil)}, nil
	})
	a.run()
	a.publish("payments", newMessage("1"), newMessage("1"))
	a.wantEffects("1")
	if got := router.all(); len(got) != 0 {
		t.Errorf("the router published %v", message.Messages(got).IDs())
	}
	got := outboxOf(t, db, "events")
	if len(got) != 3 || got[0] != "named-1" || got[1] != "1" || len(got[2]) != 36 {
		t.Errorf("the outbox holds %q", got)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != 1 {
		t.Errorf("%d records, want 1", got)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); got != 0 {
		t.Errorf("%d records with stored messages, want none", got)
	}
}

func TestPublisherRefuses(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	publisher := newOutbox(t, db, "events")
	repository := db.Repository(t, inboxsql.Options{})
	if err := publisher.Publish("events", newMessage("1")); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("outside of a handler: %v", err)
	}
	if err := publisher.Publish("events"); err != nil {
		t.Errorf("nothing to publish: %v", err)
	}
	var kept, other context.Context
	inner := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
		other = msg.Context()
		err := publisher.Publish("events", message.NewMessageWithContext(kept, "1", nil), message.NewMessageWithContext(other, "2", nil))
		if !errors.Is(err, outbox.ErrMixedTransactions) {
			t.Errorf("two transactions: %v", err)
		}
		err = publisher.Publish("events", message.NewMessageWithContext(other, "1", nil), newMessage("2"))
		if !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("one message without a transaction: %v", err)
		}
		return nil
	})
	outer := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
		kept = msg.Context()
		_, err := inner(newMessage("inner"))
		return err
	})
	if _, err := outer(newMessage("outer")); err != nil {
		t.Fatal(err)
	}
	if err := publisher.Publish("events", message.NewMessageWithContext(kept, "1", nil)); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("after the handler: %v", err)
	}
	if got := outboxOf(t, db, "events"); len(got) != 0 {
		t.Errorf("the outbox holds %q", got)
	}
	if _, err := outbox.NewPublisher(outbox.Options{}); err == nil {
		t.Error("a publisher without an adapter")
	}
}

func TestOutboxTableMissing(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	handler := func(outbox message.Publisher) message.HandlerFunc {
		m, err := inbox.NewMiddleware(db.Repository(t, inboxsql.Options{}), inbox.Options{Outbox: outbox})
		if err != nil {
			t.Fatal(err)
		}
		var got error
		a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
		ctx, cancel := context.WithCancel(context.Background())
		a.router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				_, got = h(msg)
				cancel()
				return nil, nil
			}
		}, m.Middleware)
		a.router.AddHandler("book", "payments", a.broker, "events", &recorder{}, func(msg *message.Message) ([]*message.Message, error) {
			return []*message.Message{newMessage("event")}, db.Write(msg.Context(), msg.UUID)
		})
		a.run()
		return func(msg *message.Message) ([]*message.Message, error) {
			a.publish("payments", msg)
			<-ctx.Done()
			return nil, got
		}
	}(newOutbox(t, db))
	_, err := handler(newMessage("1"))
	if err == nil || inbox.ShouldPoison(err) {
		t.Fatalf("the error is %v, want one that leaves the message with the broker", err)
	}
	t.Logf("the error says: %v", err)
	if got := db.Count(t, `SELECT (SELECT count(*) FROM effects) + (SELECT count(*) FROM watermill_inbox)`); got != 0 {
		t.Fatalf("%d rows were committed", got)
	}
}

// Watermill-sql's Publish has no context; the handler's deadline must end the statement all the same.
func TestDeadlineReachesTheOutboxInsert(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	publisher := newOutbox(t, db, "events")
	db.MustExec(t, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(20); RETURN NEW; END';
		CREATE TRIGGER slow BEFORE INSERT ON watermill_events FOR EACH ROW EXECUTE FUNCTION slow()`)
	handler := middleware.Timeout(300 * time.Millisecond)(wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		return publisher.Publish("events", message.NewMessageWithContext(msg.Context(), "1", nil))
	}))
	started := time.Now()
	_, err := handler(newMessage("1"))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the error is %v", err)
	}
	if took := time.Since(started); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
}

func TestOutboxTakesManyMessages(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	publisher := newOutbox(t, db, "events")
	const count = 30_000 // more parameters than one statement can have
	handler := wrap(t, db.Repository(t, inboxsql.Options{}), inbox.Options{}, func(msg *message.Message) error {
		messages := make([]*message.Message, count)
		for i := range messages {
			messages[i] = message.NewMessageWithContext(msg.Context(), fmt.Sprint(i), []byte("x"))
		}
		return publisher.Publish("events", messages...)
	})
	if _, err := handler(newMessage("1")); err != nil {
		t.Fatal(err)
	}
	got := outboxOf(t, db, "events")
	if len(got) != count || got[0] != "0" || got[count-1] != fmt.Sprint(count-1) {
		t.Fatalf("%d messages in the outbox, want %d in order", len(got), count)
	}
}

// Whatever driver the handler's transaction is on, and whichever version of watermill-sql has the tables: what is
// published is there once, if and only if the handler's work is.
func TestOutboxOnEveryDriver(t *testing.T) {
	t.Parallel()
	bytea := func(string) string { return "BYTEA" }
	v4 := watermillsql4.DefaultPostgreSQLSchema{}
	insertV4 := func(topic string, messages message.Messages) (string, []any, error) {
		query, err := v4.InsertQuery(watermillsql4.InsertQueryParams{Topic: topic, Msgs: messages})
		return query.Query, query.Args, err
	}
	for _, way := range testdb.Ways {
		for name, c := range map[string]struct {
			tables  watermillsql.DefaultPostgreSQLSchema
			options outbox.Options
		}{
			"v3, bytes": {watermillsql.DefaultPostgreSQLSchema{GeneratePayloadType: bytea},
				outbox.Options{SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{GeneratePayloadType: bytea}}},
			"v3, JSON": {watermillsql.DefaultPostgreSQLSchema{}, outbox.Options{SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{}}},
			"v4":       {watermillsql.DefaultPostgreSQLSchema{}, outbox.Options{InsertQuery: insertV4}},
		} {
			t.Run(way+", "+name, func(t *testing.T) {
				t.Parallel()
				db := testdb.PostgreSQL(t, "postgres")
				service := db.Way(t, way, db.URL, 1)
				if err := service.InitializeSchema(context.Background()); err != nil {
					t.Fatal(err)
				}
				for _, query := range c.tables.SchemaInitializingQueries("events") {
					db.MustExec(t, query.Query)
				}
				publisher, err := outbox.NewPublisher(c.options)
				if err != nil {
					t.Fatal(err)
				}
				fails := true
				handler := wrap(t, service, inbox.Options{}, func(msg *message.Message) error {
					if err := service.Exec(msg.Context(), `INSERT INTO effects (effect) VALUES ($1)`, msg.UUID); err != nil {
						return err
					}
					one, two := newMessage("event-1"), newMessage("event-2")
					for _, event := range []*message.Message{one, two} {
						event.Payload = []byte(`{"a": "it's \\ é"}`)
						event.Metadata.Set("key", `it's "é"`)
						event.SetContext(msg.Context())
					}
					if err := publisher.Publish("events", one, two); err != nil {
						return err
					}
					if fails {
						return errors.New("the handler fails after publishing")
					}
					return nil
				})
				if _, err := handler(newMessage("payment")); err == nil {
					t.Fatal("no error")
				}
				fails = false
				for range 2 {
					if _, err := handler(newMessage("payment")); err != nil {
						t.Fatal(err)
					}
				}
				if got := outboxOf(t, db, "events"); !slices.Equal(got, []string{"event-1", "event-2"}) {
					t.Errorf("the outbox holds %q", got)
				}
				as := map[bool]string{true: `convert_from(payload, 'UTF8')::json`, false: `payload`}[name == "v3, bytes"]
				if got := db.Count(t, `SELECT count(*) FROM watermill_events WHERE `+as+`->>'a' = $1 AND metadata->>'key' = $2`, `it's \ é`, `it's "é"`); got != 2 {
					t.Errorf("%d messages are as they were published", got)
				}
			})
		}
	}
	none := outbox.Options{SchemaAdapter: outboxSchema, InsertQuery: insertV4}
	if _, err := outbox.NewPublisher(none); err == nil {
		t.Error("a publisher with two ways to insert")
	}
}

// What no retry cures ends in the poison queue.
func TestOutboxOutsideOfAHandlerIsPermanent(t *testing.T) {
	t.Parallel()
	publisher, err := outbox.NewPublisher(outbox.Options{SchemaAdapter: outboxSchema})
	if err != nil {
		t.Fatal(err)
	}
	err = publisher.Publish("events", newMessage("1"))
	if !errors.Is(err, outbox.ErrNoTransaction) || inbox.ShouldRetry(middleware.RetryParams{Err: err}) || !inbox.ShouldPoison(err) {
		t.Errorf("%v would be retried", err)
	}
}
