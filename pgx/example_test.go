package inboxpgx_test

import (
	"context"
	"encoding/json"
	"errors"
	"log"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

// What to add to a router that you have. The whole order of middlewares is in the inbox package's
// documentation.
func Example() {
	var router *message.Router

	pool, err := pgxpool.New(context.Background(), "postgres://localhost/shop")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	repository, err := inboxpgx.NewRepository(pool, inboxpgx.Options{})
	if err != nil {
		log.Fatal(err)
	}
	if err := repository.InitializeSchema(context.Background()); err != nil {
		log.Fatal(err)
	}
	once, err := inbox.NewMiddleware(repository, inbox.Options{Logger: watermill.NopLogger{}})
	if err != nil {
		log.Fatal(err)
	}
	if err := once.AddTo(router, inbox.RouterOptions{}); err != nil {
		log.Fatal(err)
	}
}

type payment struct {
	Account string
	Cents   int
}

// The handler writes through the transaction in which the message is claimed. What sqlc generates for pgx
// takes it as it is: queries.WithTx(tx).
func ExampleTxFromContext() {
	handler := func(msg *message.Message) error {
		tx, ok := inboxpgx.TxFromContext(msg.Context())
		if !ok {
			return errors.New("the inbox middleware is missing")
		}
		var p payment
		if err := json.Unmarshal(msg.Payload, &p); err != nil {
			return inbox.Permanent(err)
		}
		_, err := tx.Exec(msg.Context(), `UPDATE accounts SET cents = cents - $1 WHERE id = $2`, p.Cents, p.Account)
		return err
	}
	_ = handler
}

// A handler is tested without a router: give it a transaction, look at what it wrote, roll back.
func ExampleContextWithTx() {
	var (
		pool    *pgxpool.Pool // of the test
		handler message.NoPublishHandlerFunc
		ctx     = context.Background()
	)
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback(ctx)

	msg := message.NewMessage("payment-7", []byte(`{"Account": "a", "Cents": 100}`))
	msg.SetContext(inboxpgx.ContextWithTx(ctx, tx))
	if err := handler(msg); err != nil {
		log.Fatal(err)
	}
	var cents int
	if err := tx.QueryRow(ctx, `SELECT cents FROM accounts WHERE id = 'a'`).Scan(&cents); err != nil {
		log.Fatal(err)
	}
}
