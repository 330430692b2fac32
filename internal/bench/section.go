package main

import (
	"context"
	"fmt"
	"math/rand/v2"
)

// section is a table of the report: its groups are the columns, their subjects the rows.
type section struct {
	name   string // the first part of each subject's name
	title  string
	unit   string // of the figures; empty: per second
	groups []*group
	notes  []func() string // more lines at the end
}

// group is what is measured side by side: each time its subjects follow each other in random order.
type group struct {
	setting  string
	judged   bool                        // by a bar, so measured more often
	before   func(context.Context) error // each time
	subjects []*subject
}

// judgedTimes is how often a round measures what is judged.
const judgedTimes = 3

// subject is a cell of the report.
type subject struct {
	name     string   // the row's
	baseline *subject // whose rate is 1; nil: this is one
	rate     func(context.Context) (float64, error)
	rates    []float64 // messages per second or the section's unit, one each time
}

func (g *group) measure(ctx context.Context) error {
	times := 1
	if g.judged {
		times = judgedTimes
	}
	for range times {
		if err := g.measureOnce(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (g *group) measureOnce(ctx context.Context) error {
	if g.before != nil {
		if err := g.before(ctx); err != nil {
			return err
		}
	}
	for _, i := range rand.Perm(len(g.subjects)) {
		s := g.subjects[i]
		rate, err := s.rate(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		s.rates = append(s.rates, rate)
	}
	return nil
}

// ratios are the rates relative to the baseline's of the same time.
func (s *subject) ratios() []float64 {
	ratios := make([]float64, len(s.rates))
	for i, rate := range s.rates {
		ratios[i] = rate / s.baseline.rates[i]
	}
	return ratios
}

// add keeps of the section what is asked for: subjects that match, and their baselines.
func (b *bench) add(s *section) {
	var groups []*group
	for _, g := range s.groups {
		kept := map[*subject]bool{}
		for _, subject := range g.subjects {
			if b.options.only.MatchString(s.name + "/" + g.setting + "/" + subject.name) {
				kept[subject] = true
				if subject.baseline != nil {
					kept[subject.baseline] = true
				}
			}
		}
		var subjects []*subject
		for _, subject := range g.subjects {
			if kept[subject] {
				subjects = append(subjects, subject)
			}
		}
		if g.subjects = subjects; len(subjects) > 0 {
			groups = append(groups, g)
		}
	}
	if s.groups = groups; len(groups) > 0 {
		b.sections = append(b.sections, s)
	}
}

// wanted reports whether a section whose figures come from each other is asked for.
func (b *bench) wanted(s *section) bool {
	for _, g := range s.groups {
		for _, subject := range g.subjects {
			if b.options.only.MatchString(s.name + "/" + g.setting + "/" + subject.name) {
				return true
			}
		}
	}
	return false
}

// subject finds a cell; nil: it was not asked for.
func (b *bench) subject(section, setting, name string) *subject {
	for _, s := range b.sections {
		for _, g := range s.groups {
			for _, subject := range g.subjects {
				if s.name == section && g.setting == setting && subject.name == name {
					return subject
				}
			}
		}
	}
	return nil
}
