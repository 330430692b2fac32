package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	_ "modernc.org/sqlite"

	inbox "github.com/devmappa/watermill-inbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// A real ledger also has a unique key on payment_id. Here it would hide the double charges.
const schema = `
CREATE TABLE payments (payment_id text NOT NULL, account text NOT NULL, amount_cents integer NOT NULL);
CREATE TABLE accounts (account text PRIMARY KEY, balance_cents integer NOT NULL);
CREATE TABLE poisoned (message_id text NOT NULL, reason text NOT NULL);`

// ledger books payments in a SQLite file.
type ledger struct {
	db       *sql.DB
	failures failures
	runs     atomic.Int64 // of the handler
}

func openLedger(ctx context.Context, file string) (*ledger, error) {
	// SQLite has one writer at a time: the others wait for it, up to the busy timeout.
	db, err := sql.Open("sqlite", "file:"+file+"?_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)")
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(4)
	db.SetMaxIdleConns(4)
	if _, err := db.ExecContext(ctx, schema); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &ledger{db: db}, nil
}

// payment is the payload of a message.
type payment struct {
	ID          string `json:"payment_id"`
	Account     string `json:"account"`
	AmountCents int64  `json:"amount_cents"`
}

// Book is the handler with the inbox: it writes through the transaction in which the message is claimed,
// and leaves the commit to the inbox.
func (l *ledger) Book(msg *message.Message) error {
	tx, ok := inboxsql.TxFromContext(msg.Context())
	if !ok {
		return errors.New("there is no transaction: the inbox is not in the router's middleware")
	}
	return l.book(msg, tx)
}

// BookNaively is the handler without the inbox: it writes to the database as it goes.
func (l *ledger) BookNaively(msg *message.Message) error {
	return l.book(msg, l.db)
}

// executor is what *sql.Tx and *sql.DB have in common.
type executor interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

func (l *ledger) book(msg *message.Message, db executor) error {
	l.runs.Add(1)
	var p payment
	if err := json.Unmarshal(msg.Payload, &p); err != nil {
		return inbox.Permanent(fmt.Errorf("malformed payment: %w", err)) // no retry can mend it
	}
	if _, err := db.ExecContext(msg.Context(),
		`INSERT INTO payments (payment_id, account, amount_cents) VALUES (?, ?, ?)`, p.ID, p.Account, p.AmountCents); err != nil {
		return err
	}
	if err := l.failures.next(p.ID); err != nil {
		return err
	}
	_, err := db.ExecContext(msg.Context(),
		`INSERT INTO accounts (account, balance_cents) VALUES (?, ?)
		ON CONFLICT (account) DO UPDATE SET balance_cents = balance_cents + excluded.balance_cents`, p.Account, p.AmountCents)
	return err
}

// StorePoisoned keeps what could not be booked, for somebody to look at. The same message may come more
// than once.
func (l *ledger) StorePoisoned(msg *message.Message) error {
	_, err := l.db.ExecContext(msg.Context(), `INSERT INTO poisoned (message_id, reason) VALUES (?, ?)`,
		msg.UUID, msg.Metadata.Get(middleware.ReasonForPoisonedKey))
	return err
}

// effects are what the messages have left in the database.
type effects struct {
	rows     int   // of the ledger
	ledger   int64 // sum of the rows, in cents
	accounts int64 // sum of the accounts, in cents
	poisoned int   // messages in the poison queue
}

func (l *ledger) effects(ctx context.Context) (e effects, err error) {
	err = l.db.QueryRowContext(ctx, `
		SELECT (SELECT count(*) FROM payments), (SELECT coalesce(sum(amount_cents), 0) FROM payments),
			(SELECT coalesce(sum(balance_cents), 0) FROM accounts), (SELECT count(DISTINCT message_id) FROM poisoned)`,
	).Scan(&e.rows, &e.ledger, &e.accounts, &e.poisoned)
	return e, err
}
