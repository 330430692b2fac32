package inboxsql_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"log"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
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
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		log.Fatal(err)
	}
	if err := once.AddTo(router, inbox.RouterOptions{PoisonPublisher: publisher, PoisonTopic: "payments_poison", Timeout: time.Minute}); err != nil {
		log.Fatal(err)
	}
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
