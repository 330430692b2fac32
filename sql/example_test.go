package inboxsql_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"log"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	_ "github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// A whole router. The subscriber and the publisher are the ones you have.
func Example() {
	var (
		subscriber message.Subscriber
		publisher  message.Publisher
		logger     watermill.LoggerAdapter = watermill.NopLogger{}
	)
	db, err := sql.Open("postgres", "postgres://localhost/shop")
	if err != nil {
		log.Fatal(err)
	}
	db.SetMaxOpenConns(10)
	db.SetMaxIdleConns(10) // the default of 2 halves the rate

	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		log.Fatal(err)
	}
	if err := repository.InitializeSchema(context.Background()); err != nil {
		log.Fatal(err)
	}
	once, err := inbox.NewMiddleware(repository, inbox.Options{Logger: logger})
	if err != nil {
		log.Fatal(err)
	}
	poison, err := middleware.PoisonQueueWithFilter(publisher, "payments_poison", inbox.ShouldPoison)
	if err != nil {
		log.Fatal(err)
	}
	retry := middleware.Retry{
		MaxRetries: 5, InitialInterval: 100 * time.Millisecond, Multiplier: 3, MaxInterval: 10 * time.Second,
		ShouldRetry: inbox.ShouldRetry, ResetContextOnRetry: true, Logger: logger,
	}

	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		log.Fatal(err)
	}
	router.AddMiddleware(poison, retry.Middleware, middleware.Timeout(time.Minute), middleware.Recoverer, once.Middleware)
	router.AddConsumerHandler("book_payment", "payments", subscriber, bookPayment)
	if err := router.Run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

type payment struct {
	Account string
	Cents   int
}

// bookPayment writes through the transaction in which the message is claimed.
func bookPayment(msg *message.Message) error {
	tx, ok := inboxsql.TxFromContext(msg.Context())
	if !ok {
		return errors.New("the inbox middleware is missing")
	}
	var p payment
	if err := json.Unmarshal(msg.Payload, &p); err != nil {
		return inbox.Permanent(err)
	}
	_, err := tx.ExecContext(msg.Context(), `UPDATE accounts SET cents = cents - $1 WHERE id = $2`, p.Cents, p.Account)
	return err
}

// A handler is tested without a router: give it a transaction, look at what it wrote, roll back.
func ExampleContextWithTx() {
	var db *sql.DB // of the test

	tx, err := db.Begin()
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()

	msg := message.NewMessage("payment-7", []byte(`{"Account": "a", "Cents": 100}`))
	msg.SetContext(inboxsql.ContextWithTx(context.Background(), tx))
	if err := bookPayment(msg); err != nil {
		log.Fatal(err)
	}
	var cents int
	if err := tx.QueryRow(`SELECT cents FROM accounts WHERE id = 'a'`).Scan(&cents); err != nil {
		log.Fatal(err)
	}
}

// The outbox: what the event bus publishes inside of a handler is committed with the handler's work.
func ExamplePublisher() {
	outbox, err := inboxsql.NewPublisher(inboxsql.PublisherOptions{SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		log.Fatal(err)
	}
	type paymentBooked struct{ ID string }

	// In a handler: the message carries the handler's context, in which the transaction is found.
	handler := func(msg *message.Message) error {
		payload, err := json.Marshal(paymentBooked{ID: msg.UUID})
		if err != nil {
			return err
		}
		return outbox.Publish("events", message.NewMessageWithContext(msg.Context(), watermill.NewUUID(), payload))
	}
	_ = handler

	// What handlers return goes the same way, and the router publishes nothing.
	options := inbox.Options{Outbox: outbox}
	_ = options
}

// A handler that publishes inside of its transaction, through watermill-sql: the message is in the outbox
// table if, and only if, the handler's work is committed. The table must exist; make it at the start.
func ExampleTxFromContext_watermillSQL() {
	handler := func(msg *message.Message) error {
		tx, ok := inboxsql.TxFromContext(msg.Context())
		if !ok {
			return errors.New("the inbox middleware is missing")
		}
		if _, err := tx.ExecContext(msg.Context(), `UPDATE accounts SET cents = cents - 100 WHERE id = 'a'`); err != nil {
			return err
		}
		outbox, err := watermillsql.NewPublisher(tx, watermillsql.PublisherConfig{
			SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{},
		}, watermill.NopLogger{})
		if err != nil {
			return err
		}
		return outbox.Publish("events", message.NewMessage(watermill.NewUUID(), []byte(`{"type": "PaymentBooked"}`)))
	}
	_ = handler
}

// An inbox partitioned by UUIDv7s, in which a month's records are kept and old ones cost nothing to delete.
func ExamplePartitions() {
	var logger watermill.LoggerAdapter = watermill.NopLogger{}
	db, err := sql.Open("postgres", "postgres://localhost/shop")
	if err != nil {
		log.Fatal(err)
	}
	partitions, err := inboxsql.NewPartitions(db, inboxsql.PartitionsOptions{
		IDs: inboxsql.UUIDv7, Retention: 30 * 24 * time.Hour, Logger: logger,
	})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := partitions.Pass(context.Background()); err != nil { // makes the table and the first partitions
		log.Fatal(err)
	}
	go partitions.Run(context.Background())

	repository, err := inboxsql.NewRepository(db, inboxsql.Options{
		SchemaAdapter: inboxsql.PartitionedPostgreSQLSchema{IDs: inboxsql.UUIDv7},
	})
	if err != nil {
		log.Fatal(err)
	}
	once, err := inbox.NewMiddleware(repository, inbox.Options{Logger: logger})
	if err != nil {
		log.Fatal(err)
	}
	_ = once
}

// A plain table becomes a partitioned one while services claim in it. Afterwards they are rolled over to
// PartitionedPostgreSQLSchema, and Partitions runs.
func ExamplePartitions_Convert() {
	var partitions *inboxsql.Partitions
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	if err := partitions.Convert(ctx); err != nil {
		log.Fatal(err) // the plain table is as it was; or, when the hour is over, call it again
	}
}
