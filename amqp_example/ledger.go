package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// ledgerSchema is one transaction, and its lock lets many instances start at once.
// A real ledger also has a unique key on payment_id. Here it would hide what -naive is to show.
const ledgerSchema = `
SELECT pg_advisory_xact_lock(hashtext('payments ledger schema'));
CREATE TABLE IF NOT EXISTS payments (payment_id text NOT NULL, account text NOT NULL, amount_cents bigint NOT NULL);
CREATE TABLE IF NOT EXISTS accounts (account text PRIMARY KEY, balance_cents bigint NOT NULL);`

// payment is the payload of a message.
type payment struct {
	ID          string `json:"payment_id"`
	Account     string `json:"account"`
	AmountCents int64  `json:"amount_cents"`
}

type handler struct {
	db     *sql.DB
	logger watermill.LoggerAdapter
}

// Book writes through the transaction of the inbox, which also commits it.
func (h handler) Book(msg *message.Message) error {
	tx, ok := inboxsql.TxFromContext(msg.Context())
	if !ok {
		return errors.New("no transaction in the context, is the inbox missing from the middleware?")
	}
	return h.book(msg.Context(), tx, msg)
}

// BookNaively is how it is done without an inbox. Each delivery of a message books the payment.
func (h handler) BookNaively(msg *message.Message) error {
	tx, err := h.db.BeginTx(msg.Context(), nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := h.book(msg.Context(), tx, msg); err != nil {
		return err
	}
	return tx.Commit()
}

func (h handler) book(ctx context.Context, tx *sql.Tx, msg *message.Message) error {
	h.logger.Debug("Booking payment", watermill.LogFields{"message_uuid": msg.UUID})
	var p payment
	if err := json.Unmarshal(msg.Payload, &p); err != nil {
		return inbox.Permanent(fmt.Errorf("malformed payment: %w", err))
	}
	if p.ID == "" || p.Account == "" || p.AmountCents <= 0 {
		return inbox.Permanent(fmt.Errorf("incomplete payment: %+v", p))
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO payments (payment_id, account, amount_cents) VALUES ($1, $2, $3)`,
		p.ID, p.Account, p.AmountCents); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO accounts (account, balance_cents) VALUES ($1, $2)
		ON CONFLICT (account) DO UPDATE SET balance_cents = accounts.balance_cents + excluded.balance_cents`,
		p.Account, p.AmountCents)
	return err
}
